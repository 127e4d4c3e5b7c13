"""Key pairs of tests, and the settings that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forage_runtime.security.signatures import SIGNING_KEY, VERIFY_KEY, RunSignatures, write_key_pair
from forage_runtime.settings import SecuritySettings


def make_keys(folder: Path, **settings: Any) -> SecuritySettings:
    """A key pair in a folder, made if need be, and settings that sign and require signatures with it."""
    if not (folder / SIGNING_KEY).exists():
        write_key_pair(folder)
    tree = {"require_signed": True, "signing_key_file": folder / SIGNING_KEY, "verify_key_file": folder / VERIFY_KEY}
    return SecuritySettings(**(tree | settings))


def make_signatures(folder: Path, run: str = "run", **settings: Any) -> RunSignatures:
    """What signs and verifies for a run with the keys of a folder."""
    return RunSignatures(make_keys(folder, **settings), run)
