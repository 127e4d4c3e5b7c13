"""Who may use the console: the token of a file, or the cookie that signing in with it gives."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from forage_console.security.addresses import is_loopback
from forage_runtime.errors import SettingsError
from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import ConsoleSettings

WIRE = "console/http"
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
    """The check of tokens and sessions. Without a file everybody who reaches the console may use it.

    A session is signed with the token that its user gave: it ends when this token leaves the file.
    """

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.time) -> None:
        """
        Raises:
            SettingsError: the file cannot be read, or holds no token.
        """
        self._file = open_token_file(file, SETTING)
        self._clock = clock
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether no token is needed."""
        return self._file is None

    def admits_token(self, given: str, client: str) -> bool:
        """Whether this is one of the tokens.

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
        if _is_one_of(given, self._tokens):
            self._tries.pop(client, None)
            return True
        self._tries[client] = tries + 1, now
        self._tries.move_to_end(client)
        while len(self._tries) > _MAX_CLIENTS:
            self._tries.popitem(last=False)
        record_refusal(WIRE, Refusal.WRONG_TOKEN, client)
        return False

    def make_session(self, token: str) -> str:
        """Make the value of a cookie that admits a browser for a week, or until the token leaves the file."""
        return _sign(token, int(self._clock()) + SESSION_S)

    def admits_session(self, value: str) -> bool:
        """Whether a cookie is one of ours and has not ended."""
        end, _, _ = value.partition(".")
        if not (end.isascii() and end.isdecimal() and len(end) < 20):
            return False
        return _is_one_of(value, [_sign(token, int(end)) for token in self._tokens]) and self._clock() < int(end)

    @property
    def _tokens(self) -> tuple[str, ...]:
        assert self._file is not None, "without a token nothing is compared"
        return self._file.tokens


def _is_one_of(given: str, known: Iterable[str]) -> bool:
    """Compare in constant time with each."""
    value = given.encode(errors="replace")
    return any([hmac.compare_digest(value, one.encode()) for one in known])


def _sign(token: str, end: int) -> str:
    proof = hmac.new(token.encode(), f"forage console session until {end}".encode(), hashlib.sha256)
    return f"{end}.{proof.hexdigest()}"
