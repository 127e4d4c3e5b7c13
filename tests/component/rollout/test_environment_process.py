"""Environments of one's own run in a confined process: what they cannot reach, what they still can, how they fail."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import pytest_asyncio
from breakout import ATTEMPTS
from breakout_targets import CODE, open_targets
from waiting import wait_until_async

from forage_proto.v1.trajectory_pb2 import ActionKind, Document, Prompt, Provenance
from forage_rollout.environments import Action, Episode, load_environments
from forage_rollout.environments.environment import EnvironmentFailedError
from forage_rollout.environments.remote import RemoteEnvironment
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.retriever import RetrieverClient, SearchResult
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import EnvironmentRoute, RolloutSettings, Settings
from forage_runtime.settings.security import SecuritySettings
from forage_sandbox import support
from forage_sandbox.support import Support, find_support

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
        self.waiting, self.cancelled = asyncio.Event(), asyncio.Event()
        self.meeting = asyncio.Barrier(20)
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
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if order == "until it waits":
            await self.waiting.wait()
        if order == "until it was cancelled":
            await self.cancelled.wait()
        if order == "meet":
            await self.meeting.wait()
        if order == "spin":
            time.sleep(600)
        if order == "crash":
            os._exit(7)
        if order == "memory":
            bytearray(2**34)
        if order == "forge":
            for number in range(3, 256):
                with contextlib.suppress(OSError):
                    socket.socket(fileno=number).send(b"\\x02\\x00\\x00\\x00[]")
            await asyncio.Event().wait()
        if order == "flood":
            await asyncio.gather(*(self.retriever.search(["flood"]) for _ in range(5000)))
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
        await (asyncio.Event().wait() if queries == ["flood"] else asyncio.sleep(0))
        if self.error is not None:
            raise self.error
        return SearchResult([[Document(id="7", contents="Oslo", score=0.5)]], Provenance(mode="bm25"), True)


Open = Callable[..., RemoteEnvironment]


def open_one(folder: Path, mode: Any = "require", **options: Any) -> RemoteEnvironment:
    """Open the environment with options of its route."""
    file = folder / "own.py"
    file.write_text(CODE.read_text() + OWN)
    routes = {"own": EnvironmentRoute(name=f"{file}:Own", **options), "nq": EnvironmentRoute(name="search")}
    settings = Settings(rollout=RolloutSettings(environments=routes), security=SecuritySettings(user_code=mode))
    retriever = FoundNothing("127.0.0.1:9")
    retriever.asked = []
    return cast(RemoteEnvironment, load_environments(settings, retriever).select("own"))


@pytest.fixture
async def open_environment(tmp_path: Path) -> AsyncIterator[Open]:
    """`open_one`; closes it after the test."""
    opened: list[RemoteEnvironment] = []

    def open_here(**options: Any) -> RemoteEnvironment:
        opened.append(open_one(tmp_path, **options))
        return opened[-1]

    yield open_here
    for environment in opened:
        await environment.close()


shares_environment = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RemoteEnvironment]:
    """One for all tests that leave its process as it was."""
    shared = open_one(tmp_path_factory.mktemp("environment"), timeout_s=300)  # its loop may starve on a busy machine
    yield shared
    await shared.close()


async def act(environment: RemoteEnvironment, order: str, episode: Episode | None = None) -> str:
    action = Action(ActionKind.ACTION_KIND_SEARCH, order, "do")
    own = episode or Episode(Prompt(group_uid="g"))
    try:
        return (await environment.respond(action, own)).body
    finally:
        if episode is None:
            environment.end(own)  # as the agent does: the next one may have its id


@needs_isolation
async def test_attempts_to_break_out_are_refused(
    open_environment: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    with open_targets(tmp_path / "secrets") as targets:
        # Of its own: the connection, and three of its event loop.
        environment = open_environment(params={**targets.params, "own_descriptors": "4"})
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
        environment = open_environment(params=targets.params, network=True, read=(targets.secret,))
        assert [await act(environment, order) for order in ("tcp", "udp", "secret")] == ["done"] * 3
        for order in ("write", "unix", "program", "list"):
            with pytest.raises(EnvironmentFailedError):
                await act(environment, order)


@shares_environment
async def test_each_trajectory_has_its_state_and_forgets_it_at_its_end(environment: RemoteEnvironment) -> None:
    one, other = Episode(Prompt(group_uid="a")), Episode(Prompt(group_uid="b"))
    said = [await act(environment, "count", episode) for episode in (one, one, other, one)]
    assert said == ["1 of a", "2 of a", "1 of b", "3 of a"]
    environment.end(one)
    assert await act(environment, "count", one) == "1 of a"


@shares_environment
async def test_calls_run_at_the_same_time(environment: RemoteEnvironment) -> None:
    await asyncio.gather(*(act(environment, "meet") for _ in range(20)))


@shares_environment
async def test_its_searches_are_carried_out_by_the_agent(environment: RemoteEnvironment) -> None:
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


@shares_environment
async def test_a_trajectory_that_is_out_of_time_cancels_its_call(environment: RemoteEnvironment) -> None:
    waiting = asyncio.create_task(act(environment, "wait"))
    await act(environment, "until it waits")
    waiting.cancel()
    await act(environment, "until it was cancelled")


@pytest.mark.parametrize(
    ("order", "words", "timeout_s"),
    [
        ("crash", "ended with exit code 7: its process is started again", 300),
        ("spin", r"its event loop stood still for timeout_s=5 s: its process is started again", 5),
        ("forge", "sent a message that is no JSON object: its process is started again", 300),
        ("flood", "sent more than 1024 searches at a time: its process is started again", 300),
    ],
)
async def test_a_process_that_fails_fails_its_trajectories_and_the_next_ones_go_on(
    open_environment: Open, order: str, words: str, timeout_s: float
) -> None:
    environment = open_environment(timeout_s=timeout_s)
    other = Episode(Prompt(group_uid="b"))
    await act(environment, "count", other)
    pid = environment._child.process.pid
    beside = asyncio.create_task(act(environment, "wait"))
    await act(environment, "until it waits")
    with pytest.raises(EnvironmentFailedError, match=words):
        await act(environment, order)
    with pytest.raises(EnvironmentFailedError, match=words):
        await beside
    assert await act(environment, "count") == "1 of g"
    with pytest.raises(EnvironmentFailedError, match="its process ended, and with it the state of this trajectory"):
        await act(environment, "count", other)
    await wait_until_async(lambda: not psutil.pid_exists(pid))


@shares_environment
async def test_an_error_fails_one_call(environment: RemoteEnvironment) -> None:
    episode = Episode(Prompt(group_uid="a"))
    await act(environment, "count", episode)
    with pytest.raises(EnvironmentFailedError, match="environment Own: MemoryError"):
        await act(environment, "memory", episode)
    assert await act(environment, "surrogate") == "\ud800"
    assert await act(environment, "count", episode) == "2 of a"


@shares_environment
async def test_it_gets_no_settings_of_others(environment: RemoteEnvironment) -> None:
    assert await act(environment, "settings") == "own"


async def test_it_closes_what_it_opened_before_its_process_ends(
    open_environment: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = open_environment()
    child = environment._child
    await environment.close()
    assert not child.is_alive
    said: list[str] = []

    def has_said() -> bool:
        said.append(capfd.readouterr().err)
        return "rollout.environments.own: closed" in "".join(said)

    await wait_until_async(has_said)


async def test_protections_that_are_required_and_missing_are_named(
    open_environment: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "find_support", lambda: Support(0, True, {"files": "no Landlock here"}))
    with pytest.raises(SettingsError, match=r"cannot isolate user code .*files would be open: no Landlock"):
        open_environment(mode="require")


def test_options_for_own_code_are_refused_for_what_is_built_in() -> None:
    with pytest.raises(ValueError, match="network, timeout_s: for code of your own; search is built in"):
        EnvironmentRoute(name="search", network=True, timeout_s=1)
