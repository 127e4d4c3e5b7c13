"""Questions of public data sets from a server that stands in for the hub."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_server import open_hostile_server, redirect_to
from public_rows import ROWS, write_rows
from typer.testing import CliRunner

from forage_cli.commands.data import app
from forage_cli.datasets.public_questions import SPLITS, fetch_collection
from forage_runtime.errors import DataError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server on loopback with the Hub's paths; yields the folder of its files."""
    root = tmp_path / "hub"
    folder = root / "datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main"
    folder.mkdir(parents=True)

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(root))

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield folder
    server.shutdown()
    server.server_close()


def test_splits_come_from_the_hub_once(tmp_path: Path, hub: Path) -> None:
    (hub / "hotpotqa").mkdir()
    for split in SPLITS["hotpotqa"]:
        write_rows(hub / "hotpotqa" / f"{split}.jsonl", ROWS)
    options = ["hotpotqa", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.exit_code == 0
    assert "questions: train 3" in done.output
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "dev.parquet",
        "manifest.json",
        "train.parquet",
    ]
    (hub / "hotpotqa" / "dev.jsonl").unlink()
    assert len(fetch_collection("hotpotqa", tmp_path / "cache")) == 2


def test_an_unreachable_hub_is_an_error_with_a_remedy(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"bamboogle/test\.jsonl answers 404: give .* --file test=test\.jsonl"):
        fetch_collection("bamboogle", tmp_path / "cache")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"bamboogle/test\.jsonl cannot be reached \(.*\): give .* --file"):
        fetch_collection("bamboogle", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"because HF_HUB_OFFLINE is set: give .* --file"):
        fetch_collection("bamboogle", tmp_path / "cache")
    assert list((tmp_path / "cache" / "bamboogle").iterdir()) == []


def test_a_download_does_not_leave_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_hostile_server() as hub, open_hostile_server() as elsewhere:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.address}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        hub.serve = redirect_to(f"http://localhost:{elsewhere.address.rpartition(':')[2]}/")
        with pytest.raises(DataError, match=r"it leads to http://localhost, which is not the hub's"):
            fetch_collection("bamboogle", tmp_path)
        assert elsewhere.requests == []
    assert not (tmp_path / "bamboogle/test.jsonl").exists()
