"""`forage security keys`."""

from __future__ import annotations

from pathlib import Path

from forage_command import RunForage, run_forage

__all__ = ["run_forage"]


def test_a_key_pair_is_made_once_and_named_by_its_fingerprint(run_forage: RunForage, tmp_path: Path) -> None:
    ended = run_forage("security", "keys", str(tmp_path / "[/x]"))
    assert ended.code == 0
    assert (tmp_path / "[/x]/signing-key.pem").stat().st_mode & 0o777 == 0o600
    shown = ended.stdout + ended.stderr
    assert f"{tmp_path}/[/x]/verify-key.pem verifies" in shown
    assert "PRIVATE" not in shown
    ended = run_forage("security", "keys", str(tmp_path / "[/x]"))
    assert ended.code == 2
    assert "signing-key.pem exists: name another folder" in ended.stderr
    assert "Traceback" not in ended.stderr
