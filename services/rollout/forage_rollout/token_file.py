"""The bearer token of the service, or of an endpoint: a file that may change while the service runs."""

from __future__ import annotations

import hmac
from pathlib import Path

from forage_common.clients.auth import SCHEME, SETTING, read_token
from forage_common.errors import SettingsError
from forage_common.telemetry.logs import get_logger

_Stamp = tuple[int, int, int]


class TokenFile:
    """A token that is rotated by rewriting its file. While the file is missing or empty the last token stays valid.

    Args:
        setting: name of the setting with the file, for errors.

    Raises:
        SettingsError: the file cannot be read, or holds no token, when the service starts.
    """

    def __init__(self, file: Path, setting: str = SETTING) -> None:
        self._file = file
        self._setting = setting
        self._stamp, self._token = self._read()

    @property
    def token(self) -> str:
        """The current token."""
        try:
            if _stamp(self._file) != self._stamp:
                self._stamp, self._token = self._read()
                get_logger().info("auth_token_rotated", file=str(self._file))
        except (OSError, SettingsError) as error:
            get_logger().warning("auth_token_kept", detail=str(error))
        return self._token

    def accepts(self, authorization: str) -> bool:
        """Whether the value of an `authorization` header carries the token; compares in constant time."""
        scheme, _, token = authorization.partition(" ")
        is_equal = hmac.compare_digest(token.strip().encode(), self.token.encode())
        return is_equal and scheme.lower() == SCHEME

    def _read(self) -> tuple[_Stamp, str]:
        token = read_token(self._file, self._setting)
        return _stamp(self._file), token


def _stamp(file: Path) -> _Stamp:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
