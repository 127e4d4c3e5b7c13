"""A worker, whatever the agent does in it: the session ends with a body that the service takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from forage_rollout.command.worker import Client, Task, Worker
from forage_rollout.sessions.requests import Ending, read_ending

TASK = Task("g/0", "s", (), ())


def returns(reward: Any) -> Callable[[Task, Client], Awaitable[Any]]:
    async def run(task: Task, client: Client) -> Any:
        return reward

    return run


def raises(error: BaseException) -> Callable[[Task, Client], Awaitable[Any]]:
    async def run(task: Task, client: Client) -> Any:
        raise error

    return run


async def cancels_what_it_awaits(task: Task, client: Client) -> float:
    part = asyncio.ensure_future(asyncio.Event().wait())
    part.cancel()
    await part
    return 1.0


async def end(run: Callable[[Task, Client], Awaitable[Any]]) -> Ending:
    """Run an agent and end its session: what the service reads of the end."""
    endings = []

    def answer(request: httpx.Request) -> httpx.Response:
        endings.append(read_ending(request.content))
        return httpx.Response(200, json={})

    worker = Worker(run, "http://service")
    worker._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = Client("http://service/v1/sessions/a", "k", worker._http)
    running = asyncio.create_task(worker._judge(TASK, client))  # as in a session: the agent has a task of its own
    await worker._end(client, await running)
    (ending,) = endings
    return ending


@pytest.mark.parametrize("reward", [None, 0, 1.5, True, -1e6])
async def test_a_reward_ends_the_session(reward: Any) -> None:
    assert await end(returns(reward)) == Ending(None if reward is None else float(reward))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 2e6, -(10**40), "1", []])
async def test_a_reward_that_the_service_would_refuse_is_an_error_of_the_agent(reward: Any) -> None:
    ending = await end(returns(reward))
    assert ending.reward is None
    assert ending.error.startswith("the agent returned ")
    assert ending.error.endswith("expected a number of at most 1e+06, or None")


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (raises(KeyError("x")), "KeyError: 'x'"),
        (raises(SystemExit(3)), "SystemExit: 3"),
        (raises(OSError("no file \udcff")), "OSError: no file ?"),
        (raises(ValueError("x" * 10**7)), f"ValueError: {'x' * 1988}"),
        (cancels_what_it_awaits, "CancelledError: "),
    ],
)
async def test_whatever_the_agent_raises_ends_its_session_and_not_the_worker(
    run: Callable[[Task, Client], Awaitable[Any]], error: str
) -> None:
    assert await end(run) == Ending(error=error)


async def test_a_session_that_is_over_cancels_its_agent() -> None:
    begun = asyncio.Event()

    async def run(task: Task, client: Client) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    worker = Worker(run, "http://service")
    judging = asyncio.create_task(worker._judge(TASK, Client("", "", httpx.AsyncClient())))
    await begun.wait()
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
