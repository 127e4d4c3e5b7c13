"""Bearer tokens and passwords: files that may change while a service runs."""

from __future__ import annotations

import hmac
from pathlib import Path

from forage_runtime.errors import SettingsError
from forage_runtime.security.file_stamp import Stamp, read_stamp
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger

HEADER = "authorization"
SETTING = "rollout.auth_token_file"
SCHEME = "bearer"
_sampler = LogSampler(per_minute=1)


def read_tokens(file: Path, setting: str = SETTING) -> tuple[str, ...]:
    """Read the tokens of a file: one a line, at least one.

    Args:
        setting: name of the setting with the file, for errors.

    Raises:
        SettingsError: the file cannot be read, or a line is not a single ASCII word.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="ascii").split("\n")]
    except OSError as error:
        raise SettingsError(f"{setting} {file} cannot be read ({error.strerror}): give a file with a token") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{setting} {file} is not ASCII text: write one line with a token") from None
    tokens = tuple(line for line in lines if line)
    if not tokens or any(len(token.split()) != 1 for token in tokens):
        raise SettingsError(f"{setting} {file} holds no single token: write one line without spaces")
    return tokens


def read_token(file: Path, setting: str = SETTING) -> str:
    """Read the token that a client sends: the first of the file; raises as `read_tokens`."""
    return read_tokens(file, setting)[0]


def authorization_metadata(file: Path | None, setting: str = SETTING) -> tuple[tuple[str, str], ...]:
    """gRPC metadata, or HTTP headers, that carry the token; empty if there is no file; raises as `read_tokens`."""
    return () if file is None else ((HEADER, f"Bearer {read_token(file, setting)}"),)


def read_bearer(authorization: str) -> str:
    """The bearer token in the value of an `authorization` header; empty without one."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == SCHEME else ""


class TokenFile:
    """The tokens of a file, each a line, which clients may send and which a service accepts.

    To rotate, add the new token as the first line, wait until all clients send it, and remove the old line. While the
    file is missing or malformed the last tokens stay valid.

    Args:
        setting: name of the setting with the file, for errors.

    Raises:
        SettingsError: the file cannot be read, or holds no token, when the service starts.
    """

    def __init__(self, file: Path, setting: str = SETTING) -> None:
        self._file = file
        self._setting = setting
        self._stamp, self._tokens = self._read()

    @property
    def token(self) -> str:
        """The token to send: the first."""
        return self.tokens[0]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens to accept."""
        try:
            if read_stamp(self._file) != self._stamp:
                self._stamp, self._tokens = self._read()
                get_logger().info("auth_token_rotated", file=str(self._file), tokens=len(self._tokens))
        except (OSError, SettingsError) as error:
            if _sampler.admit(str(error)):  # it is read for each call
                get_logger().warning("auth_token_kept", detail=str(error))
        return self._tokens

    def accepts(self, authorization: str) -> bool:
        """Whether the value of an `authorization` header carries one of the tokens; compares in constant time."""
        given = read_bearer(authorization).encode()
        matches = [hmac.compare_digest(given, token.encode()) for token in self.tokens]
        return any(matches)

    def _read(self) -> tuple[Stamp, tuple[str, ...]]:
        try:
            stamp = read_stamp(self._file)  # before the contents: no change of them is missed
        except OSError:  # `read_tokens` says why: it is missing, or in a folder that may not be entered
            stamp = (0, 0, 0)
        return stamp, read_tokens(self._file, self._setting)


def open_token_file(file: Path | None, setting: str) -> TokenFile | None:
    """The tokens of a service; None where it asks for none; raises as `TokenFile`."""
    return None if file is None else TokenFile(file, setting)
