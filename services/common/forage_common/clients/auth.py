"""Tokens and passwords that clients send, read from files."""

from __future__ import annotations

from pathlib import Path

from forage_common.errors import SettingsError

HEADER = "authorization"
SETTING = "rollout.auth_token_file"
SCHEME = "bearer"


def read_token(file: Path, setting: str = SETTING) -> str:
    """Read the token from a file, without surrounding white space.

    Args:
        setting: name of the setting with the file, for errors.

    Raises:
        SettingsError: the file cannot be read, or is not a single ASCII word.
    """
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise SettingsError(f"{setting} {file} cannot be read ({error.strerror}): give a file with a token") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{setting} {file} is not ASCII text: write one line with a token") from None
    if not token or len(token.split()) != 1:
        raise SettingsError(f"{setting} {file} holds no single token: write one line without spaces")
    return token


def authorization_metadata(file: Path | None) -> tuple[tuple[str, str], ...]:
    """gRPC metadata, or HTTP headers, that carry the token; empty if there is no file.

    Raises:
        SettingsError: the file cannot be read, or holds no token.
    """
    return () if file is None else ((HEADER, f"Bearer {read_token(file)}"),)
