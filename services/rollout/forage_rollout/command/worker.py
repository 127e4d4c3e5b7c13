"""A worker: takes sessions from a rollout service, runs the user's agent in each, and ends it.

It needs httpx alone of the service's environment, so that agents with libraries of their own can run it in theirs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from forage_rollout.sessions.requests import LARGEST_REWARD, cut_error
from forage_runtime.clients.outgoing import bound_replies
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.security.token_file import HEADER, TokenFile
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger

log = get_logger()
_TAKE = "/v1/sessions/next"
_WAIT_S = 30.0
_KEEP_S = 5.0
"""Between two signs of life; the service gives a session to another worker after a silence of 20 s."""
_RETRY_S = 1.0
_END_S = 60.0
"""For so long an end is sent again; then the session is run again, by whichever worker takes it."""
_CALL_S = 30.0
_CANCEL_S = 5.0
_REPLY_BYTES = 64 * 2**20
_GONE = 410
_sampler = LogSampler(per_minute=2)


class SessionOverError(Exception):
    """The service has closed the session: it was too slow, or the service has lost it."""


@dataclass(frozen=True)
class Task:
    """What an agent has to do.

    Attributes:
        id: names the question and the sample; the same when it is run again.
        messages: of the question, each with role and content.
        targets: accepted answers, for an agent that gives the reward itself.
    """

    id: str
    data_source: str
    messages: Sequence[Mapping[str, str]]
    targets: Sequence[str]


@dataclass(frozen=True)
class Client:
    """The policy, within one session: `base_url` and `api_key` are for any OpenAI client; `chat` needs none."""

    base_url: str
    api_key: str
    http: httpx.AsyncClient

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The policy's reply to a chat.

        Args:
            options: of OpenAI's chat completions, such as max_tokens and stop.

        Raises:
            httpx.HTTPStatusError: the request was refused; the response says why.
        """
        body = {"messages": list(messages), **options}
        headers = {HEADER: f"Bearer {self.api_key}"}
        reply = await self.http.post(f"{self.base_url}/chat/completions", json=body, headers=headers, timeout=None)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"])


Run = Callable[[Task, Client], Awaitable[float | None]]


class Worker:
    """Runs an agent in the sessions of one service.

    Args:
        url: of the service, such as http://127.0.0.1:18632.
        tokens: what the service asks for; None: nothing.
    """

    def __init__(
        self, run: Run, url: str, tokens: TokenFile | None = None, verify: ssl.SSLContext | bool = True
    ) -> None:
        self._run = run
        self._url = url
        self._tokens = tokens
        self._http = httpx.AsyncClient(timeout=_CALL_S, **bound_replies(_REPLY_BYTES, verify=verify))

    async def work(self, parallel: int) -> None:
        """Run so many sessions at once, until cancelled.

        Raises:
            SettingsError: the service refuses this worker.
        """
        log.info("worker_started", service=self._url, parallel=parallel)
        try:
            async with self._http, asyncio.TaskGroup() as tasks:
                for _ in range(parallel):
                    tasks.create_task(self._work())
        except* SettingsError as refused:
            raise refused.exceptions[0] from None

    async def _work(self) -> None:
        while True:
            if (taken := await self._take()) is not None:
                await self._run_session(taken)

    async def _take(self) -> dict[str, Any] | None:
        """The next session; None where none waits now, or the service does not answer."""
        headers = {} if self._tokens is None else {HEADER: f"Bearer {self._tokens.token}"}
        try:
            reply = await self._http.post(
                f"{self._url}{_TAKE}", json={"wait_s": _WAIT_S}, headers=headers, timeout=_WAIT_S + _CALL_S
            )
            if reply.status_code in (401, 403):
                raise SettingsError(f"{self._url} refuses this worker: {reply.text[:300]}")
            reply.raise_for_status()
            return None if reply.status_code == 204 else dict(reply.json())
        except (httpx.HTTPError, ValueError) as error:
            if _sampler.admit("take"):
                log.warning("waiting_for_service", service=self._url, detail=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_RETRY_S)  # wait: pause before another attempt
            return None

    async def _run_session(self, taken: dict[str, Any]) -> None:
        task, client = Task(**taken["task"]), Client(f"{self._url}{taken['base_url']}", taken["key"], self._http)
        running = asyncio.create_task(self._judge(task, client))
        keeping = asyncio.create_task(self._keep(client))
        try:
            # wait: the service limits the time of a session, and `keeping` hears of its end
            await asyncio.wait({running, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await self._end(client, running.result())
                log.info("session_done", task=task.id, **running.result())
            else:
                log.warning("session_over", task=task.id)
        except (SessionOverError, TimeoutError) as error:
            log.warning("session_over", task=task.id, detail=type(error).__name__)
        finally:
            for one in (running, keeping):
                one.cancel()
            await asyncio.wait({running, keeping}, timeout=_CANCEL_S)  # wait: for the agent's own cleaning up

    async def _judge(self, task: Task, client: Client) -> dict[str, Any]:
        """Run the agent; returns what ends the session."""
        try:
            reward = await self._run(task, client)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code may raise anything
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            log.exception("agent_failed", task=task.id)
            return {"error": cut_error(f"{type(error).__name__}: {error}")}
        if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= LARGEST_REWARD):  # NaN, too
            expected = f"a number of at most {LARGEST_REWARD:g}, or None"
            return {"error": cut_error(f"the agent returned {reward!r:.200}: expected {expected}")}
        return {"reward": None if reward is None else float(reward)}

    async def _keep(self, client: Client) -> None:
        """Give signs of life; returns once the service says that the session is over."""
        while True:
            await asyncio.sleep(_KEEP_S)  # wait: pause between two signs of life
            try:
                await self._post(client, "keep", {}, _KEEP_S)
            except SessionOverError:
                return
            except UnavailableError:
                continue  # the service may be back before the silence is too long

    async def _end(self, client: Client, ending: dict[str, Any]) -> None:
        """End the session; sent again while the service does not answer. An end that has arrived is over."""
        async with asyncio.timeout(_END_S):
            while True:
                try:
                    await self._post(client, "end", ending)
                    return
                except UnavailableError as error:
                    log.warning("session_not_ended", detail=str(error))
                    await asyncio.sleep(_RETRY_S)  # wait: pause before another attempt

    async def _post(self, client: Client, verb: str, body: dict[str, Any], timeout_s: float = _CALL_S) -> None:
        headers = {HEADER: f"Bearer {client.api_key}"}
        try:
            reply = await self._http.post(f"{client.base_url}/{verb}", json=body, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self._url} gave no answer: {type(error).__name__}: {error}") from error
        if reply.status_code == _GONE:
            raise SessionOverError
        if not reply.is_success:
            raise UnavailableError(f"{self._url} answered {reply.status_code}: {reply.text[:300]}")


def _is_cancelled() -> bool:
    """Whether this task itself is to end, and not something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
