"""Fuzzing finds what it looks for, in a server that has every fault; and the same seed makes the same inputs."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from fuzz import targets
from fuzz.inputs import Fault, Input, Verdict
from fuzz.messages import generate_payloads
from fuzz.play import MAY_GROW_BYTES, Play, Result
from fuzz.processes import Process
from fuzz.report import summarize
from fuzz.targets import ServiceTarget
from ports import reserve_ports

from forage_proto.v1.reward_pb2 import ScoreRequest
from forage_proto.v1.trajectory_pb2 import GroundTruth


def post(body: bytes) -> Input:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    return Input("victim", "http", (head + body,))


def play(folder: Path, *bodies: bytes) -> Result:
    """Send bodies to a victim, one after the other."""
    port = reserve_ports()
    process = Process("cli", ["-m", "fuzz.programs.victim", str(port)], folder, "victim")
    target = ServiceTarget([process], (port, "/"), http_port=port)
    playing = Play("victim", target, 1, folder / "failures", lambda result: None)
    return asyncio.run(playing.run(iter([post(body) for body in bodies]), len(bodies)))


def test_a_server_without_faults_is_clean(tmp_path: Path) -> None:
    result = play(tmp_path, b"a", b"full", b"")
    assert (result.inputs, result.outcomes, result.is_clean) == (3, {"200": 2, "503": 1}, True)
    assert result.saved == []
    _, last = summarize({"victim": result.to_row()}, 0)
    assert last == {
        "inputs": 3,
        "crashes": 0,
        "errors_5xx": 0,
        "hangs": 0,
        "rss_growth": last["rss_growth"],
        "rss_growth_limit": MAY_GROW_BYTES,
        "wires": 1,
        "seed": 0,
        "failed": [],
        "clean": True,
    }


def test_errors_crashes_and_lines_that_are_no_json_are_counted_and_kept(tmp_path: Path) -> None:
    result = play(tmp_path, b"a", b"fail", b"die", b"b", b"print")
    assert (result.inputs, result.errors, result.crashes, result.hangs) == (5, 2, 1, 0)
    assert any("exit code 3" in problem for problem in result.problems)
    assert any("no line of JSON" in problem for problem in result.problems)
    kept = [(file.name.split("-")[1], Input.load(file)) for file in map(Path, result.saved)]
    assert (Fault.CRASH, post(b"die")) in kept, "one of those that were sent last"
    assert [one for fault, one in kept if fault == Fault.ERROR] == [post(b"fail")]
    _, last = summarize({"victim": result.to_row()}, 0)
    assert (last["errors_5xx"], last["crashes"], last["clean"]) == (2, 1, False)


def test_an_input_without_an_answer_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "LIMIT_S", 2.0)
    result = play(tmp_path, b"a", b"sleep", b"b")
    assert (result.inputs, result.hangs, result.crashes) == (3, 1, 0)
    assert [Input.load(Path(file)) for file in result.saved] == [post(b"sleep")]


class Parser:
    """A target that fails where a content has "bad" in it."""

    processes = ()

    async def start(self) -> None:
        pass

    async def send(self, one: Input) -> Verdict:
        is_bad = b"bad" in one.parts[0]
        return Verdict("exception", Fault.ERROR, "Traceback\nKeyError: 'x'") if is_bad else Verdict("read")

    async def check(self) -> str:
        return ""

    async def close(self) -> None:
        pass


def test_a_failing_content_is_made_small_and_one_of_a_kind_is_kept_twice(tmp_path: Path) -> None:
    inputs = [Input("files", "read", (b"x" * n + b"bad" + b"y" * 90,), "name") for n in (50, 60, 70)]
    playing = Play("files", Parser(), 1, tmp_path, lambda result: None)
    result = asyncio.run(playing.run(iter(inputs), len(inputs)))
    assert (result.errors, len(result.problems)) == (3, 1)
    kept = [Input.load(Path(file)) for file in result.saved]
    assert len(kept) == 2
    assert all(b"bad" in one.parts[0] and one.size < 10 for one in kept)


def test_memory_that_grows_is_no_clean_result(tmp_path: Path) -> None:
    result = play(tmp_path, *[b"a"] * 40, *[b"leak"] * 90)
    assert result.grown_bytes > MAY_GROW_BYTES
    assert not result.is_clean
    _, last = summarize({"victim": result.to_row()}, 0)
    assert not last["clean"]


def test_the_same_seed_makes_the_same_messages() -> None:
    good = [ScoreRequest(items=[{"ground_truth": GroundTruth(targets=["a"])}])]
    first, again = ([*itertools.islice(generate_payloads(ScoreRequest, good, 5), 400)] for _ in range(2))
    other = [*itertools.islice(generate_payloads(ScoreRequest, good, 6), 400)]
    assert first == again != other
    assert len(set(first)) > 200
