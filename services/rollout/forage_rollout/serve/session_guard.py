"""The keys of the sessions that this process gave to workers, and the guard of their requests."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from forage_rollout.sessions.requests import GONE, WRONG_KEY
from forage_runtime.security.http.guard import App, Receive, Scope, Send, find_peer
from forage_runtime.security.refusals import Refusal, record_refusal
from forage_runtime.security.token_file import HEADER, read_bearer

PREFIX = "/v1/sessions/"
MOST_KEYS = 2**16
"""More sessions have no worker at once; the oldest key is forgotten then."""


def find_session(path: str) -> str:
    """The id of the session whose request has this path; empty for any other path."""
    id, slash, _ = path.removeprefix(PREFIX).partition("/")
    return id if path.startswith(PREFIX) and slash else ""


class SessionKeys:
    """Keys by session, of those that are not over."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    def add(self, id: str, key: str) -> None:
        """Note the key of a session that a worker gets."""
        while len(self._keys) >= MOST_KEYS:
            del self._keys[next(iter(self._keys))]
        self._keys[id] = key

    def remove(self, id: str) -> None:
        """Forget a session that is over."""
        self._keys.pop(id, None)

    def find_problem(self, id: str, key: str) -> tuple[int, str, str] | None:
        """Status, sentence and kind of the refusal; None where this is the key. Compares in constant time."""
        known = self._keys.get(id)
        if known is None:
            return 410, GONE, "session_over"
        if not hmac.compare_digest(key.encode(), known.encode()):
            return 401, WRONG_KEY, "unauthenticated"
        return None


class SessionGuard:
    """ASGI middleware that refuses requests of sessions without their key, before anything of the body is read.

    Args:
        refuse: builds the answer: status, sentence, kind of the error.
    """

    def __init__(self, app: App, wire: str, keys: SessionKeys, refuse: Callable[[int, str, str], App]) -> None:
        self._app = app
        self._wire = wire
        self._keys = keys
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (id := find_session(scope["path"])):
            given = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), "")
            if problem := self._keys.find_problem(id, read_bearer(given)):
                if problem[0] == 401:
                    reason = Refusal.WRONG_TOKEN if given else Refusal.NO_TOKEN
                    record_refusal(self._wire, reason, find_peer(scope))
                await self._refuse(*problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)
