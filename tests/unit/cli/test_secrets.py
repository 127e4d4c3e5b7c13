"""No command shows credentials, and only their owner can read the file that needs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forage_cli.local.stack import Stack
from forage_cli.main import app
from forage_runtime.files.template_values import keep_template_date
from forage_runtime.settings import load_settings

SECRET = "S3cr3t"


URL = f"redis://someone:{SECRET}@127.0.0.1:1/0"


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "show", f"redis.url={URL}"],
        ["config", "show", f"trainer.upload_url=https://h/b?sig={SECRET}", "--explain"],
        ["config", "explain", "redis", f"redis.url={URL}"],
    ],
)
def test_shown_settings_have_no_credentials(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.exception
    assert SECRET not in shown.output
    assert "***" in shown.output


@pytest.mark.parametrize(("url", "mode"), [(URL, 0o600), ("redis://127.0.0.1:1/0", 0o644)])
def test_settings_with_a_password_are_their_owners(tmp_path: Path, url: str, mode: int) -> None:
    settings = load_settings(None, [f"run.dir={tmp_path}", f"redis.url={url}"])
    (settings.run.folder).mkdir()
    file = settings.run.folder / "settings.yaml"
    file.write_text("an earlier start's")
    file.chmod(0o666)
    Stack(settings, []).start()
    assert file.stat().st_mode & 0o777 == mode
    assert load_settings(file) == keep_template_date(settings)


def test_a_stack_without_trainer_says_what_it_is_for(tmp_path: Path) -> None:
    stack = Stack(load_settings(None, [f"run.dir={tmp_path}"]), [])
    stack.activity = "evaluating"
    stack.start()
    assert json.loads((stack.folder / "state.json").read_text()) == {"phase": "evaluating"}
    (stack.folder / "state.json").unlink()
    (stack.folder / "metrics.jsonl").touch()  # a run of training is served: its own state stays
    stack.start()
    assert not (stack.folder / "state.json").exists()
