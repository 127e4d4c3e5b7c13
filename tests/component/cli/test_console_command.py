"""`forage console`, and the console beside a run."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forage_cli.commands.start import find_runs
from forage_cli.local import console as local
from forage_cli.local.stack import TRAINING, Program, list_addresses, shift_ports
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings, load_settings

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built page, whether this checkout has one or not."""
    page = tmp_path / "index.html"
    page.write_text("<!doctype html>")
    monkeypatch.setattr(local, "PAGE", page)
    return page


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    (folder / "one/settings.yaml").write_text("{}")
    return folder


def settle(**overrides: Any) -> Settings:
    return load_settings(None, [f"console.{name}={json.dumps(str(value))}" for name, value in overrides.items()], {})


def test_a_folder_of_a_run_is_shown_in_the_folder_of_runs(runs: Path) -> None:
    assert find_runs(str(runs)) == (str(runs), "")
    assert find_runs(str(runs / "one")) == (str(runs), "/runs/one")
    (runs / "latest").symlink_to("one")
    assert find_runs(str(runs / "latest")) == (str(runs), "/runs/one")
    assert find_runs("s3://bucket/runs") == ("s3://bucket/runs", "")
    with pytest.raises(UserError, match="nowhere is not a folder: give one with runs"):
        find_runs(str(runs / "nowhere"))


def add(settings: Settings) -> tuple[tuple[Program, ...], str]:
    text = StringIO()
    programs = local.add_console(settings, TRAINING, Console(file=text, width=200))
    return programs, text.getvalue()


def test_a_run_has_a_console(page: Path, free_address: Callable[[], str]) -> None:
    address = free_address()
    programs, text = add(settle(http_address=address))
    assert programs == (*TRAINING, Program.CONSOLE)
    assert text == f"console  http://{address}\n"


def test_a_run_goes_on_without_a_console_that_is_not_built(page: Path, free_address: Callable[[], str]) -> None:
    page.unlink()
    programs, text = add(settle(http_address=free_address()))
    assert programs == TRAINING
    assert text == "no console: the console's pages are not built: run 'make console'\n"


class _Other(http.server.BaseHTTPRequestHandler):
    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("is_same", [True, False, None])
def test_a_run_leaves_a_port_to_who_has_it(page: Path, runs: Path, is_same: bool | None) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Other)
    settings = settle(http_address=f"127.0.0.1:{server.server_port}", runs=runs)
    digest = settings.runs_digest if is_same else "another"
    _Other.answer = b"hello" if is_same is None else json.dumps({"service": "console", "runs": digest}).encode()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        programs, text = add(settings)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert programs == TRAINING
    expected = {True: "(it runs already)", False: "a console of other runs", None: "stop what uses it"}
    assert expected[is_same] in text


def test_its_port_moves_with_those_of_the_stack() -> None:
    settings = load_settings(None, shift_ports(24000), {})
    assert list_addresses(settings, [Program.CONSOLE]) == {"console.http_address": "127.0.0.1:24050"}
