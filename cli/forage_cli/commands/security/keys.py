"""`forage security keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forage_runtime.text.console import TextConsole


def keys(folder: Annotated[Path, typer.Argument(help="Folder for the two files.", show_default=False)]) -> None:
    """Make a key pair (Ed25519) with which the trainer signs policies and checkpoints.

    signing-key.pem is for the trainer alone (security.signing_key_file), verify-key.pem for whoever loads what it
    publishes (security.verify_key_file).

    Examples:

      forage security keys secrets
    """
    from forage_runtime.security.signatures import SIGNING_KEY, VERIFY_KEY, write_key_pair

    key = write_key_pair(folder)
    TextConsole().print(
        f"key {key}: {folder / SIGNING_KEY} signs (security.signing_key_file, for the trainer alone); "
        f"{folder / VERIFY_KEY} verifies (security.verify_key_file)",
        highlight=False,
        soft_wrap=True,
    )
