"""`forage security keys`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(*arguments: str) -> tuple[int, str]:
    code = "from forage_cli.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_key_pair_is_made_once_and_named_by_its_fingerprint(tmp_path: Path) -> None:
    code, text = run("security", "keys", str(tmp_path / "[/x]"))
    assert code == 0
    assert (tmp_path / "[/x]/signing-key.pem").stat().st_mode & 0o777 == 0o600
    assert f"{tmp_path}/[/x]/verify-key.pem verifies" in text
    assert "PRIVATE" not in text
    code, text = run("security", "keys", str(tmp_path / "[/x]"))
    assert code == 2
    assert "signing-key.pem exists: name another folder" in text
    assert "Traceback" not in text
