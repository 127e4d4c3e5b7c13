"""The sessions of one agent's process: those that wait for a worker, and those that have one."""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any

from forage_rollout.loop.trajectory_builder import TrajectoryBuilder
from forage_rollout.sessions.requests import (
    GONE,
    WRONG_KEY,
    HttpReply,
    SessionError,
    read_chat,
    read_ending,
    write_chat,
    write_json,
    write_refusal,
)
from forage_rollout.sessions.session import Generate, Render, Session


def find_replica(id: str) -> str:
    """The name of the replica that has a session, from the session's id, which may be anything."""
    return id.partition(".")[0]


class SessionTable:
    """Sessions by id. Their number is that of the samples in flight, which the dispatcher limits.

    Attributes:
        replica: begins the id of each, so that a request finds its way here.
    """

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self._sessions: dict[str, Session] = {}
        self._waiting: deque[Session] = deque()

    @property
    def waiting(self) -> int:
        """Sessions without a worker."""
        return len(self._waiting)

    def open(self, builder: TrajectoryBuilder, render: Render, generate: Generate, most_requests: int) -> Session:
        """Offer a session to workers."""
        id = f"{self.replica}.{secrets.token_hex(8)}"
        session = Session(id, builder, render, generate, most_requests)
        self._sessions[id] = session
        self._waiting.append(session)
        return session

    def close(self, session: Session) -> None:
        """Forget a session; its worker's next request is refused."""
        session.close()
        del self._sessions[session.id]
        if session in self._waiting:
            self._waiting.remove(session)

    def take(self) -> dict[str, Any] | None:
        """Give the session that has waited longest to a worker: its id, key and task. None where none waits."""
        if not self._waiting:
            return None
        session = self._waiting.popleft()
        session.hear()
        session.taken.set()
        return {"id": session.id, "key": session.key, "task": session.describe_task()}

    async def answer(self, id: str, key: str, verb: str, body: bytes) -> HttpReply:
        """Answer a worker's request: `chat/completions`, `keep` or `end`."""
        try:
            session = self._find(id, key)
            if verb == "chat/completions":
                request = read_chat(body)
                return write_chat(request, await session.chat(request))
            if verb == "end":
                session.end(read_ending(body))
            else:
                session.hear()
            return write_json({})
        except SessionError as error:
            return write_refusal(error)
        except RecursionError:
            return write_refusal(SessionError(400, "the body is nested too deeply"))

    def _find(self, id: str, key: str) -> Session:
        session = self._sessions.get(id)
        if session is None or not session.taken.is_set():
            raise SessionError(410, GONE, kind="session_over")
        if not session.accepts(key):
            raise SessionError(401, WRONG_KEY, kind="unauthenticated")
        return session
