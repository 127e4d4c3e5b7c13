"""User rewards that want out: each attempt is refused, its trajectory says why, and the service goes on."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from breakout import ATTEMPTS
from breakout_scorer import Score, open_scorer, write_code
from breakout_targets import Targets, open_targets
from waiting import wait_until

from forage_proto.v1 import trajectory_pb2
from forage_reward.isolation.user_code import ContractError, check_score
from forage_reward.score import Component, sum_components
from forage_runtime.errors import SettingsError
from forage_sandbox import child_watch, support
from forage_sandbox.support import Support, find_support

OK, INTERNAL, TIMEOUT = trajectory_pb2.STATUS_OK, trajectory_pb2.STATUS_INTERNAL, trajectory_pb2.STATUS_TIMEOUT


needs_isolation = pytest.mark.skipif(bool(find_support().missing), reason=f"this machine: {find_support().describe()}")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_code(tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FORAGE__REDIS__PASSWORD", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN"):
            patch.setenv(name, "s3cret")
        with open_targets(tmp_path_factory.mktemp("outside") / "secrets") as opened:
            yield opened


@pytest.fixture(scope="module")
def confined(code: Path, targets: Targets) -> Iterator[Score]:
    user, score = open_scorer(code, targets, "require")
    yield score
    user.close()


@pytest.fixture(scope="module")
def hurried(code: Path, targets: Targets) -> Iterator[Score]:
    user, score = open_scorer(code, targets, "require", timeout_s=0.5)
    yield score
    user.close()


@needs_isolation
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_to_break_out_is_refused(confined: Score, targets: Targets, attempt: str) -> None:
    if attempt.endswith(("_by_call", "_thread", "_queue")) and platform.machine() != "x86_64":
        pytest.skip("calls by the numbers of x86_64")
    score = confined(attempt)
    assert score.status == INTERNAL, f"{attempt} succeeded"
    assert "raised" in score.detail, score.detail
    assert targets.was_touched() == []
    assert confined("fine").status == OK


@needs_isolation
@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        ("tcp", "user code has no network: reward.user.mine.network=true opens it"),
        ("dns", "user code has no network: reward.user.mine.network=true opens it"),
        ("secret", "user code may open no other files: reward.user.mine.read=["),
        ("program", "user code may start no programs or processes"),
    ],
)
def test_the_trajectory_names_the_setting_that_would_open_it(confined: Score, attempt: str, sentence: str) -> None:
    assert sentence in confined(attempt).detail


@needs_isolation
@pytest.mark.parametrize(
    ("order", "status", "sentence"),
    [
        ("memory", INTERNAL, "it needs more memory than memory_mib=512"),
        ("map", INTERNAL, "raised OSError: [Errno 12] Cannot allocate memory"),
        ("shared_map", INTERNAL, "raised OSError: [Errno 12] Cannot allocate memory"),
        ("threads", INTERNAL, "threads and processes, allowed are 256"),
        ("large_file", INTERNAL, "raised OSError: [Errno 27] File too large"),
        ("many_files", INTERNAL, "its temporary folder has"),
        ("disk", INTERNAL, "its temporary folder has"),
        ("signal", INTERNAL, "was killed by signal 36"),
        ("forge", INTERNAL, "it answered with what is no score"),
        ("forge_nan", INTERNAL, "it answered with what is no score"),
        ("dig", INTERNAL, "its process is started again"),
        ("dig_and_stay", INTERNAL, "its temporary folder has a part that cannot be looked at (File name too long)"),
        ("unlinked", INTERNAL, "its temporary folder has"),
        ("huge", INTERNAL, "gave an answer of 4294967295 bytes"),
        ("lock", INTERNAL, "ended with exit code 3"),
    ],
)
def test_what_it_uses_has_an_end(confined: Score, order: str, status: int, sentence: str) -> None:
    score = confined(order)
    assert score.status == status, score.detail
    assert sentence in score.detail
    assert confined("fine").status == OK


@needs_isolation
@pytest.mark.parametrize("order", ["print", "stop"])
def test_a_call_without_end_is_a_timeout(hurried: Score, order: str, capfd: pytest.CaptureFixture[str]) -> None:
    score = hurried(order)
    assert score.status == TIMEOUT, score.detail
    wait_until(lambda: hurried("fine").status == OK)
    assert len(capfd.readouterr().err) < 150_000


@needs_isolation
def test_a_thread_that_works_unasked_ends_its_process(
    code: Path, targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_sandbox.child_watch.IDLE_CPU_S", 0.5)
    user, score = open_scorer(code, targets, "require")
    (child,) = user._pools[0]._children
    assert score("hide").status == OK
    wait_until(lambda: not child.is_alive)
    assert child.describe_end() == "was stopped: it works while it is not asked to"
    assert score("fine").status == OK, "no trajectory suffers from that"
    user.close()


@needs_isolation
def test_no_name_of_a_process_hides_it_or_others_from_the_watch(
    code: Path, targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = [], child_watch.Watched.look

    def count(watched: child_watch.Watched) -> None:
        look(watched)
        looks.append(watched)

    monkeypatch.setattr(child_watch.Watched, "look", count)
    user, score = open_scorer(code, targets, "require")
    assert score("name").status == OK
    watched = user._pools[0]._children[0]._watched
    seen = looks.count(watched)
    wait_until(lambda: looks.count(watched) > seen + 1)
    assert score("disk").detail.startswith("was stopped: its temporary folder has")
    user.close()


@pytest.mark.parametrize(
    "change",
    [
        {"total": math.nan},
        {"components": (Component("a", math.inf, 0.0),)},
        {"components": (Component("a", 0.0, -math.inf),)},
        {"components": (Component("a" * 101, 0.0, 0.0),)},
        {"components": (Component("", 0.0, 0.0),)},
        {"components": (Component("a", 0.0, 0.0),) * 65},
        {"reward": "em"},
        {"detail": "a" * 100_000},
    ],
)
def test_a_score_that_no_reward_returns_is_none(change: dict[str, Any]) -> None:
    score = sum_components("mine", (Component("a", 1.0, 1.0),), "fine")
    check_score("mine", score)
    with pytest.raises(ContractError):
        check_score("mine", score._replace(**change))


@needs_isolation
def test_network_files_and_programs_are_opened_by_name(code: Path, tmp_path: Path) -> None:
    with open_targets(tmp_path / "secrets") as targets:
        opened = {"network": True, "read": (targets.secret,), "programs": True}
        user, score = open_scorer(code, targets, "require", **opened)
        details = {order: score(order) for order in ("tcp", "udp", "secret", "program", "fork")}
        assert {order: s.status for order, s in details.items()} == dict.fromkeys(details, OK), details
        for order in (
            "raw",
            "unix",
            "abstract",
            "pair",
            "list",
            "write",
            "session",
            "chmod",
            "namespace",
            "kill_parent",
        ):
            assert score(order).status == INTERNAL, order
        user.close()
        user, score = open_scorer(code, targets, "require", write=(targets.secret.parent,))
        assert score("create").status == score("write").status == OK
        assert score("tcp").status == INTERNAL
        user.close()


@needs_isolation
def test_processes_that_it_starts_are_counted_and_end_with_it(code: Path, targets: Targets) -> None:
    user, score = open_scorer(code, targets, "require", programs=True, memory_mib=8192)
    (child,) = user._pools[0]._children
    group = child.process.pid
    failed = score("processes")
    assert failed.status == INTERNAL
    assert "threads and processes, allowed are 256" in failed.detail or "BlockingIOError" in failed.detail
    assert score("fine").status == OK
    user.close()
    wait_until(lambda: not any(_is_in(group, process) for process in psutil.process_iter()), "the end of all of them")


def _is_in(group: int, process: psutil.Process) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@needs_isolation
def test_the_temporary_folder_is_its_own_and_ends_with_it(code: Path, targets: Targets) -> None:
    user, score = open_scorer(code, targets, "require")
    (child,) = user._pools[0]._children
    folder = child._folder
    assert folder is not None
    assert score("keep").status == OK
    assert score("folder").components[0].raw == 1
    assert (folder / "kept").exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    user.close()
    assert not folder.exists()


@needs_isolation
def test_it_ends_with_its_service_whatever_it_does(code: Path, targets: Targets) -> None:
    user, _ = open_scorer(code, targets, "require")
    (child,) = user._pools[0]._children
    assert psutil.Process(child.process.pid).environ().keys() & {"MY_TOKEN", "AWS_SECRET_ACCESS_KEY"} == set()
    status = Path(f"/proc/{child.process.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert "CapEff:\t0000000000000000" in status
    user.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process.pid, 0)


def test_a_machine_without_protection_is_refused_where_it_is_required(
    code: Path, targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "this kernel has no Landlock: Linux 5.13 or later has it"
    monkeypatch.setattr(support, "find_support", lambda: Support(0, True, {"files": why}))
    with pytest.raises(
        SettingsError, match=r"security\.user_code is require, .*files would be open: this kernel has no"
    ):
        open_scorer(code, targets, "require")
    user, score = open_scorer(code, targets, "auto")
    assert f"files open ({why})" in user.rewards["mine"].summary
    assert score("tcp").status == INTERNAL
    user.close()
