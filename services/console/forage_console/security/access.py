"""Who may use the console: the token of a file, or the cookie that signing in with it gives."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from forage_common.errors import SettingsError
from forage_common.security.tokens import read_token
from forage_common.settings import ConsoleSettings
from forage_common.telemetry.logs import get_logger
from forage_console.security.addresses import is_loopback

SETTING = "console.auth_token_file"
SESSION_S = 7 * 24 * 3600
FREE_TRIES = 5
"""Wrong tokens of a client before it has to wait, twice as long after each further one."""
MAX_PAUSE_S = 60.0
_FORGET_S = 900.0
_MAX_CLIENTS = 1000


def check_exposure(settings: ConsoleSettings) -> None:
    """Check that other machines need a token.

    Raises:
        SettingsError: they need none.
    """
    if settings.auth_token_file is None and not is_loopback(settings.http_address):
        raise SettingsError(
            f"console.http_address is {settings.http_address}, which other machines may reach, and {SETTING} is not "
            "set: give it a file with a token, or listen on 127.0.0.1"
        )


class TooManyTriesError(Exception):
    """A client has given wrong tokens. wait_s: seconds until it may try again."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"too many wrong tokens: try again in {wait_s:.0f} s")
        self.wait_s = wait_s


class Access:
    """The check of tokens and sessions. Without a file everybody who reaches the console may use it."""

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.time) -> None:
        """
        Raises:
            SettingsError: the file cannot be read, or holds no token.
        """
        self._file = file
        self._clock = clock
        self._token = None if file is None else read_token(file, SETTING)
        self._version = self._stat()
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether no token is needed."""
        return self._token is None

    def admits_token(self, given: str, client: str) -> bool:
        """Whether this is the token.

        Raises:
            TooManyTriesError: the client has to wait first.
        """
        tries, last = self._tries.get(client, (0, 0.0))
        now = self._clock()
        if now - last > _FORGET_S:
            tries = 0
        pause_s = min(MAX_PAUSE_S, 2.0 ** (tries - FREE_TRIES)) if tries >= FREE_TRIES else 0.0
        if now < last + pause_s:
            raise TooManyTriesError(last + pause_s - now)
        if hmac.compare_digest(given.encode(errors="replace"), self._read().encode()):
            self._tries.pop(client, None)
            return True
        self._tries[client] = tries + 1, now
        self._tries.move_to_end(client)
        while len(self._tries) > _MAX_CLIENTS:
            self._tries.popitem(last=False)
        get_logger().warning("wrong_token", client=client, tries=tries + 1)
        return False

    def make_session(self) -> str:
        """Make the value of a cookie that admits a browser for a week, or until the token changes."""
        return self._sign(int(self._clock()) + SESSION_S)

    def admits_session(self, value: str) -> bool:
        """Whether a cookie is one of ours and has not ended."""
        end, _, _ = value.partition(".")
        if not (end.isascii() and end.isdecimal() and len(end) < 20):
            return False
        return hmac.compare_digest(value.encode(errors="replace"), self._sign(int(end)).encode()) and (
            self._clock() < int(end)
        )

    def _sign(self, end: int) -> str:
        proof = hmac.new(self._read().encode(), f"forage console session until {end}".encode(), hashlib.sha256)
        return f"{end}.{proof.hexdigest()}"

    def _read(self) -> str:
        """The token, read again where the file has changed; the old one while the new one cannot be read."""
        if self._file is not None and self._stat() != self._version:
            try:
                self._token = read_token(self._file, SETTING)
                self._version = self._stat()
            except SettingsError as error:
                get_logger().warning("auth_token_kept", detail=str(error))
        assert self._token is not None, "without a token nothing is compared"
        return self._token

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)
