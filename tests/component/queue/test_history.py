"""What a process records of its operations on a real server, through kills, lost replies and a full disk."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import redis
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import (
    LedgerEntry,
    Policy,
    PolicySegment,
    Prompt,
    Trajectory,
    TrajectoryGroup,
)
from forage_queue.checker.check import Limits, check, check_operations
from forage_queue.checker.operations import read_history
from forage_queue.streams.client import Entry, StreamClient
from forage_queue.streams.history import History, describe_policy, open_history
from forage_runtime.errors import FencedError, UnavailableError
from forage_runtime.settings import RedisSettings, RunSettings
from forage_trajectory.codec import pack_group


@pytest.fixture
def run(tmp_path: Path) -> RunSettings:
    return RunSettings(id="run", dir=tmp_path, record_history=True)


@pytest.fixture
def trainer(redis_server: RedisSettings, run: RunSettings) -> StreamClient:
    client = StreamClient(redis_server, "run", history=open_history(run, "trainer"))
    client.create_groups()
    return client


@pytest.fixture
def worker(redis_server: RedisSettings, run: RunSettings) -> StreamClient:
    return StreamClient(redis_server, "run", history=open_history(run, "worker"))


def build_prompt(batch: int, position: int) -> Prompt:
    return Prompt(run_id="run", group_uid=f"q/train/{2 * batch + position}/0", batch=batch, position=position)


def work(worker: StreamClient, policy: Policy) -> None:
    for entry in worker.claim_prompts("w", 10, 0.0):
        prompt = entry.message
        segments = [PolicySegment(version=policy.version, epoch=policy.epoch, begin=0, end=3)]
        group = TrajectoryGroup(
            group_uid=prompt.group_uid,
            batch=prompt.batch,
            position=prompt.position,
            trajectories=[Trajectory(segments=segments)] * 2,
        )
        assert worker.finish(entry, pack_group(group))


def take_step(trainer: StreamClient, worker: StreamClient, step: int) -> None:
    policy = Policy(version=step - 1, epoch=trainer.epoch)
    trainer.publish(policy)
    assert worker.history
    with worker.history.record("load", describe_policy(policy)):
        pass
    for position in range(2):
        trainer.issue(build_prompt(step, position))
    work(worker, policy)
    entries = trainer.claim_groups(trainer.trajectories, 10, 0.1)
    ledger = LedgerEntry(step=step, group_uids=[entry.message.group_uid for entry in entries])
    trainer.acknowledge(ledger, [entry.id for entry in entries])


def test_the_history_of_a_run_on_a_real_server_holds(
    trainer: StreamClient, worker: StreamClient, run: RunSettings, redis_server: RedisSettings
) -> None:
    trainer.acquire_epoch()
    take_step(trainer, worker, 1)
    assert worker.claim_prompts("w", 10, 0.0) == []
    successor = StreamClient(redis_server, "run", history=open_history(run, "trainer"))
    successor.acquire_epoch()
    with pytest.raises(FencedError):
        trainer.issue(build_prompt(2, 0))
    take_step(successor, worker, 2)
    assert not successor.issue(build_prompt(2, 0))
    successor.close_replies(successor.key("validation-after"), 2)
    history = read_history(run.folder)
    assert history.processes == 3
    report = check_operations(history, Limits(2, 2, 0))
    assert report.violations == ()
    assert report.is_complete
    counts = report.count_by_kind()
    assert counts["issue"] == {"ok": 4, "refused": 2}
    assert counts["claim_prompts"].total() == 2, "none where there was nothing to take"
    assert [(one["stream"], one["epoch"]) for one in history.select("close_replies")] == [("validation-after", 2)]


def test_a_run_that_is_still_going_is_checked_as_far_as_it_went(
    trainer: StreamClient, worker: StreamClient, run: RunSettings
) -> None:
    trainer.acquire_epoch()
    take_step(trainer, worker, 1)

    enough = threading.Event()

    def go_on() -> None:
        for step in count(2):
            take_step(trainer, worker, step)
            if enough.is_set():
                return

    going = threading.Thread(target=go_on, daemon=True)
    going.start()
    steps = set()
    while going.is_alive() and len(steps) < 5:
        report = check(run.folder)
        assert report.violations == ()
        steps.add(report.steps)
    assert going.is_alive(), "a step has failed"
    enough.set()
    going.join()


def test_no_operation_of_a_recorded_history_can_be_taken_out(
    trainer: StreamClient, worker: StreamClient, run: RunSettings
) -> None:
    trainer.acquire_epoch()
    take_step(trainer, worker, 1)
    take_step(trainer, worker, 2)
    trainer.discard(trainer.trajectories, [])  # what nobody needs may be missing at the end of a file
    worker.finish(Entry(b"0-1", build_prompt(3, 0)), pack_group(TrajectoryGroup()))
    for file in (run.folder / "history").iterdir():
        lines = file.read_text().splitlines(keepends=True)
        numbers = {json.loads(line)["n"] for line in lines[1:]}
        assert len(numbers) > 5
        for number in numbers - {max(numbers)}:
            file.write_text("".join([lines[0], *(line for line in lines[1:] if json.loads(line)["n"] != number)]))
            gaps = check_operations(read_history(run.folder), Limits()).violations
            assert [gap.rule for gap in gaps][:1] == ["gap"], number
        file.write_text("".join(lines))
    assert check_operations(read_history(run.folder), Limits(2, 2, 0)).violations == ()


def test_nothing_is_recorded_by_default(redis_server: RedisSettings, tmp_path: Path) -> None:
    run = RunSettings(id="run", dir=tmp_path)
    client = StreamClient(redis_server, "run", history=open_history(run, "trainer"))
    client.create_groups()
    assert client.issue(build_prompt(1, 0))
    assert not run.folder.exists()


def test_a_run_that_loses_a_group_and_counts_another_twice_is_found(
    trainer: StreamClient, worker: StreamClient, run: RunSettings
) -> None:
    trainer.acquire_epoch()
    take_step(trainer, worker, 1)
    first = trainer.read_ledger()[1].group_uids
    trainer.publish(Policy(version=1, epoch=1))
    for position in range(2):
        trainer.issue(build_prompt(2, position))
    trainer.acknowledge(LedgerEntry(step=2, group_uids=[first[0]]), [])
    rules = {violation.rule for violation in check(run.folder).violations}
    assert rules == {"lost", "twice", "unfounded"}


def test_an_operation_in_flight_at_a_kill_is_unknown(
    redis_server: RedisSettings, run: RunSettings, trainer: StreamClient
) -> None:
    code = (
        "import sys\n"
        "from forage_runtime.settings import RedisSettings, RunSettings\n"
        "from forage_queue.streams.client import Entry, StreamClient\n"
        "from forage_queue.streams.history import open_history\n"
        "from forage_proto.v1.trajectory_pb2 import Prompt\n"
        "history = open_history(RunSettings.model_validate_json(sys.argv[2]), 'trainer')\n"
        "client = StreamClient(RedisSettings.model_validate_json(sys.argv[1]), 'run', history=history)\n"
        "client.acquire_epoch()\n"
        "sys.stdin.readline()\n"
        "client.issue(Prompt(group_uid='uid', batch=1))\n"
    )
    command = [sys.executable, "-c", code, redis_server.model_dump_json(), run.model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        wait_until(lambda: [one for one in read_history(run.folder).select("acquire_epoch") if one.happened])
        server = redis.Redis.from_url(redis_server.url).info("server")["process_id"]
        os.kill(server, signal.SIGSTOP)
        try:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
            wait_until(lambda: read_history(run.folder).select("issue"))
            process.kill()
        finally:
            os.kill(server, signal.SIGCONT)
    (issue,) = read_history(run.folder).select("issue")
    assert (issue.result, issue["uid"], issue["epoch"]) == ("unknown", "uid", 1)


def test_a_refusal_after_a_lost_reply_is_unknown(
    redis_server: RedisSettings, run: RunSettings, trainer: StreamClient
) -> None:
    with lose_one_reply(redis_server) as address:
        unlucky = StreamClient(RedisSettings(url=address), "run", history=open_history(run, "trainer"))
        unlucky.ping()
        assert not unlucky.issue(build_prompt(1, 0)), "its first try has issued it"
    assert not trainer.issue(build_prompt(1, 0))
    tries = [one for one in read_history(run.folder).operations if one.kind == "issue"]
    assert [one.result for one in tries] == ["unknown", "refused"]


def test_a_group_whose_reply_was_lost_is_known_as_finished(
    redis_server: RedisSettings, run: RunSettings, trainer: StreamClient, worker: StreamClient
) -> None:
    trainer.acquire_epoch()
    policy = Policy(version=0, epoch=1)
    trainer.publish(policy)
    trainer.issue(build_prompt(1, 0))
    (entry,) = worker.claim_prompts("w", 1, 0.0)
    group = TrajectoryGroup(group_uid=entry.message.group_uid, batch=1)
    with lose_one_reply(redis_server) as address:
        unlucky = StreamClient(RedisSettings(url=address), "run", history=open_history(run, "worker"))
        unlucky.ping()
        assert unlucky.finish(entry, pack_group(group)), "its first try has finished it"
    assert not worker.finish(entry, pack_group(group))
    tries = [one for one in read_history(run.folder).operations if one.kind == "finish"]
    assert [one.result for one in tries] == ["ok", "refused"]


def test_an_error_may_have_happened(run: RunSettings, trainer: StreamClient, redis_server: RedisSettings) -> None:
    server = redis.Redis.from_url(redis_server.url).info("server")["process_id"]
    impatient = StreamClient(
        redis_server.model_copy(update={"timeout_s": 0.3}), "run", 0.1, open_history(run, "trainer")
    )
    impatient.ping()
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(UnavailableError):
            impatient.publish(Policy(version=1, epoch=1))
    finally:
        os.kill(server, signal.SIGCONT)
    (publish,) = read_history(run.folder).select("publish")
    assert (publish.result, publish["version"], publish["epoch"]) == ("error", 1, 1)
    assert publish.error.startswith("UnavailableError: no answer from Redis")


def test_a_full_disk_delays_lines_and_no_operation(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from forage_queue.streams.history import History\n"
        "history = History(Path(sys.argv[1]) / 'history', 'run', 'trainer')\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))\n"
        "for number in range(50):\n"
        "    with history.record('discard', {'epoch': 1, 'stream': 'trajectories', 'entries': [str(number)]}):\n"
        "        pass\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "with history.record('discard', {'epoch': 1, 'stream': 'trajectories', 'entries': ['50']}):\n"
        "    pass\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (ended.stdout + ended.stderr).count("history_not_written") == 1, ended
    operations = read_history(tmp_path).operations
    assert [one["entries"] for one in operations] == [[str(number)] for number in range(51)]
    assert read_history(tmp_path).gaps == []


def test_a_folder_that_is_never_writable_takes_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    folder.touch()  # not even root can write below a file
    history = History(folder, "run", "worker")
    for _ in range(2000):
        with history.record("publish", {"padding": "x" * 10_000}):
            pass
    assert len(history._unwritten) < 5 * 2**20


def test_threads_of_a_process_share_its_file(tmp_path: Path) -> None:
    history = History(tmp_path / "history", "run", "trainer")

    def record() -> None:
        for _ in range(200):
            with history.record("issue", {"stream": "validation-after"}):
                pass

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = read_history(tmp_path)
    assert len(read.operations) == 800
    assert read.gaps == []
    assert {one.result for one in read.operations} == {"ok"}


@contextmanager
def lose_one_reply(settings: RedisSettings) -> Iterator[str]:
    """A way to the server on which the first integer reply is lost; its URL."""
    port = int(settings.url.rpartition(":")[2].partition("/")[0])
    lost = threading.Event()

    def forward(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            while request := client.recv(65536):
                server.sendall(request)
                reply = server.recv(65536)
                if reply.startswith(b":") and not lost.is_set():
                    lost.set()
                    return
                client.sendall(reply)

    def accept() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=forward, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"
    assert lost.is_set()
