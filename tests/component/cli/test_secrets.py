"""The status shows no password."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from forage_cli.main import app

SECRET = "S3cr3t"


URL = f"redis://someone:{SECRET}@127.0.0.1:1/0"


def test_the_status_names_redis_without_its_password(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"redis: {{url: '{URL}'}}\nrun: {{dir: {tmp_path}}}\n")
    shown = CliRunner().invoke(app, ["status", "--config", str(file)])
    assert SECRET not in shown.output
    assert "redis://***@" in shown.output
