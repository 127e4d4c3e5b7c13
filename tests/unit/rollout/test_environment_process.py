"""Environments of one's own run in a confined process: what they cannot reach, what they still can, how they fail."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from breakout import ATTEMPTS
from breakout_targets import CODE, open_targets

from forage_common.clients.calls import RefusedError
from forage_common.clients.retriever import RetrieverClient, SearchResult
from forage_common.errors import SettingsError, UnavailableError
from forage_common.settings import EnvironmentRoute, RolloutSettings, Settings
from forage_common.settings.security import SecuritySettings
from forage_common.v1.trajectory_pb2 import ActionKind, Document, Prompt, Provenance
from forage_isolation import support
from forage_isolation.support import Support, find_support
from forage_rollout.environments import Action, Episode, load_environments
from forage_rollout.environments.environment import EnvironmentFailedError
from forage_rollout.environments.remote import RemoteEnvironment

needs_isolation = pytest.mark.skipif(bool(find_support().missing), reason=f"this machine: {find_support().describe()}")
OWN = """
import asyncio
import time

from forage_rollout.environments import Environment, Observation


class Own(Environment):
    tags = ("do", "answer")

    def __init__(self, settings, retriever, **targets):
        super().__init__(settings, retriever)
        self.targets = targets
        self.others = settings.environments

    async def respond(self, action, episode):
        order = action.content
        if order == "count":
            episode.state["n"] = episode.state.get("n", 0) + 1
            return Observation(f"{episode.state['n']} of {episode.prompt.group_uid}")
        if order == "search":
            found = await self.retriever.search(["q"], topk=2, filters={"a": "b"}, mode="bm25")
            return Observation("x", documents=found.documents[0], provenance=found.provenance, partial=found.partial)
        if order == "wait":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        if order == "was cancelled":
            return Observation(str(self.cancelled))
        if order == "sleep":
            await asyncio.sleep(0.3)
        if order == "spin":
            time.sleep(60)
        if order == "crash":
            os._exit(7)
        if order == "memory":
            bytearray(2**34)
        if order == "forge":
            for number in range(3, 256):
                with contextlib.suppress(OSError):
                    socket.socket(fileno=number).send(b"\\x02\\x00\\x00\\x00[]")
            await asyncio.sleep(60)
        if order == "flood":
            await asyncio.gather(*(self.retriever.search(["q"]) for _ in range(5000)))
        if order == "surrogate":
            return Observation("\\ud800")
        if order == "settings":
            return Observation(" ".join(self.others))
        if order in ATTEMPTS:
            ATTEMPTS[order](self.targets)
        return Observation("done")

    async def close(self):
        with open(os.environ["TMPDIR"] + "/closed", "w"):
            print("closed")
"""


class FoundNothing(RetrieverClient):
    """What the agent's own client would find."""

    asked: list[tuple[Any, ...]]
    error: Exception | None = None

    async def search(self, queries: Any, topk: int = 0, filters: Any = None, mode: str = "") -> SearchResult:
        self.asked.append((queries, topk, filters, mode))
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return SearchResult([[Document(id="7", contents="Oslo", score=0.5)]], Provenance(mode="bm25"), True)


Open = Callable[..., Awaitable[RemoteEnvironment]]


@pytest.fixture
async def open_environment(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the environment with options of its route."""
    opened: list[RemoteEnvironment] = []
    file = tmp_path / "own.py"
    file.write_text(CODE.read_text() + OWN)

    async def open_one(mode: Any = "require", **options: Any) -> RemoteEnvironment:
        routes = {"own": EnvironmentRoute(path=file, **options), "nq": EnvironmentRoute(name="search")}
        settings = Settings(rollout=RolloutSettings(environments=routes), security=SecuritySettings(user_code=mode))
        retriever = FoundNothing("127.0.0.1:9")
        retriever.asked = []
        environment = cast(RemoteEnvironment, load_environments(settings, retriever).select("own"))
        opened.append(environment)
        return environment

    yield open_one
    for environment in opened:
        await environment.close()


async def act(environment: RemoteEnvironment, order: str, episode: Episode | None = None) -> str:
    action = Action(ActionKind.ACTION_KIND_SEARCH, order, "do")
    return (await environment.respond(action, episode or Episode(Prompt(group_uid="g")))).body


@needs_isolation
async def test_attempts_to_break_out_are_refused(
    open_environment: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    with open_targets(tmp_path / "secrets") as targets:
        # Of its own: the connection, and three of its event loop.
        environment = await open_environment(params={**targets.params, "own_descriptors": "4"})
        succeeded = []
        for order in ATTEMPTS:
            if order.endswith(("_by_call", "_thread", "_queue")) and platform.machine() != "x86_64":
                continue
            try:
                await act(environment, order)
                succeeded.append(order)
            except EnvironmentFailedError:
                continue
        assert succeeded == []
        assert targets.was_touched() == []
        assert await act(environment, "fine") == "done"
        with pytest.raises(EnvironmentFailedError, match=r"Own: PermissionError: .*environments\.own\.network"):
            await act(environment, "tcp")
        with pytest.raises(
            EnvironmentFailedError, match=r"environments\.own\.read=\[.*token\] opens it to read"
        ) as caught:
            await act(environment, "secret")
        assert "own.py" in caught.value.stack


@needs_isolation
async def test_a_route_opens_network_and_files_by_name(open_environment: Open, tmp_path: Path) -> None:
    with open_targets(tmp_path / "secrets") as targets:
        environment = await open_environment(params=targets.params, network=True, read=(targets.secret,))
        assert [await act(environment, order) for order in ("tcp", "udp", "secret")] == ["done"] * 3
        for order in ("write", "unix", "program", "list"):
            with pytest.raises(EnvironmentFailedError):
                await act(environment, order)


async def test_each_trajectory_has_its_state_and_forgets_it_at_its_end(open_environment: Open) -> None:
    environment = await open_environment()
    one, other = Episode(Prompt(group_uid="a")), Episode(Prompt(group_uid="b"))
    said = [await act(environment, "count", episode) for episode in (one, one, other, one)]
    assert said == ["1 of a", "2 of a", "1 of b", "3 of a"]
    environment.end(one)
    assert await act(environment, "count", one) == "1 of a"


async def test_calls_run_at_the_same_time(open_environment: Open) -> None:
    environment = await open_environment()
    await act(environment, "fine")
    begin = time.monotonic()
    await asyncio.gather(*(act(environment, "sleep") for _ in range(20)))
    assert time.monotonic() - begin < 3


async def test_its_searches_are_carried_out_by_the_agent(open_environment: Open) -> None:
    environment = await open_environment()
    action = Action(ActionKind.ACTION_KIND_SEARCH, "search", "do")
    found = await environment.respond(action, Episode(Prompt()))
    assert [(d.id, d.contents, d.score) for d in found.documents] == [("7", "Oslo", 0.5)]
    assert (found.provenance.mode, found.partial) == ("bm25", True)
    retriever = cast(FoundNothing, environment._retriever)
    assert retriever.asked == [(["q"], 2, {"a": "b"}, "bm25")]
    for error in (UnavailableError("gone"), RefusedError("no such field")):
        retriever.error = error
        with pytest.raises(type(error), match=str(error)):
            await environment.respond(action, Episode(Prompt()))


async def test_a_trajectory_that_is_out_of_time_cancels_its_call(open_environment: Open) -> None:
    environment = await open_environment()
    await act(environment, "fine")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await act(environment, "wait")
    assert await act(environment, "was cancelled") == "True"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("crash", "ended with exit code 7: its process is started again"),
        ("spin", r"its event loop stood still for timeout_s=1 s: its process is started again"),
        ("forge", "sent a message that is no JSON object: its process is started again"),
        ("flood", "sent more than 1024 searches at a time: its process is started again"),
    ],
)
async def test_a_process_that_fails_fails_its_trajectories_and_the_next_ones_go_on(
    open_environment: Open, order: str, words: str
) -> None:
    environment = await open_environment(timeout_s=1)
    other = Episode(Prompt(group_uid="b"))
    await act(environment, "count", other)
    pid = environment._child.process.pid
    beside = asyncio.create_task(act(environment, "wait"))
    await asyncio.sleep(0.1)
    with pytest.raises(EnvironmentFailedError, match=words):
        await act(environment, order)
    with pytest.raises(EnvironmentFailedError, match=words):
        await beside
    assert await act(environment, "count") == "1 of g"
    with pytest.raises(EnvironmentFailedError, match="its process ended, and with it the state of this trajectory"):
        await act(environment, "count", other)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_error_fails_one_call(open_environment: Open) -> None:
    environment = await open_environment()
    episode = Episode(Prompt(group_uid="a"))
    await act(environment, "count", episode)
    with pytest.raises(EnvironmentFailedError, match="environment Own: MemoryError"):
        await act(environment, "memory", episode)
    assert await act(environment, "surrogate") == "\ud800"
    assert await act(environment, "count", episode) == "2 of a"


async def test_it_gets_no_settings_of_others(open_environment: Open) -> None:
    assert await act(await open_environment(), "settings") == "own"


async def test_it_closes_what_it_opened_before_its_process_ends(
    open_environment: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = await open_environment()
    child = environment._child
    await environment.close()
    assert not child.is_alive
    deadline = time.monotonic() + 5
    said = ""
    while "rollout.environments.own: closed" not in said:
        assert time.monotonic() < deadline
        said += capfd.readouterr().err
        await asyncio.sleep(0.05)


async def test_protections_that_are_required_and_missing_are_named(
    open_environment: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "find_support", lambda: Support(0, True, {"files": "no Landlock here"}))
    with pytest.raises(SettingsError, match=r"cannot isolate user code .*files would be open: no Landlock"):
        await open_environment("require")


def test_options_for_own_code_are_refused_for_what_is_built_in() -> None:
    with pytest.raises(ValueError, match="network, timeout_s: for code of your own; search is built in"):
        EnvironmentRoute(name="search", network=True, timeout_s=1)
