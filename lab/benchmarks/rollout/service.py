"""The rollout service as users run it, with Redis and the reward, and the trainer's end of its streams."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import plan
from prometheus_client.parser import text_string_to_metric_families
from rich.status import Status

from forage_cli.local.serving import publish, wait_until_ready
from forage_cli.local.stack import Program, Stack
from forage_proto.v1 import trajectory_pb2 as pb
from forage_queue.streams.client import StreamClient
from forage_queue.streams.users import Role
from forage_runtime.settings import Settings
from forage_trajectory.trajectory import Trajectory

RUNNING = (Program.REDIS, Program.REWARD, Program.ROLLOUT)


@dataclass
class Pass:
    """Groups in order of arrival: their time, and the number of tokens sampled in each."""

    began: float
    finished: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def compute_rate(self, first: int, last: int) -> float:
        """Compute tokens a second from the end of group `first` to the end of group `last`, counted from 0."""
        return sum(self.tokens[first + 1 : last + 1]) / (self.finished[last] - self.finished[first])


class Service:
    """A run of which this process is the trainer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._streams = StreamClient(settings.redis, settings.run.id)
        self._batch = 0

    def run(self, uids: list[str], samples: int, outstanding: int = 0) -> Pass:
        """Issue the prompts, all at once or at most `outstanding` of them, and claim their groups.

        Every trajectory must be complete and have exactly the tokens of the plan.
        """
        outstanding = outstanding or len(uids)
        self._batch += 1
        passed, issued = Pass(time.perf_counter()), 0
        while len(passed.finished) < len(uids):
            while issued < len(uids) and issued - len(passed.finished) < outstanding:
                self._issue(uids[issued], samples, issued)
                issued += 1
            entries = self._streams.claim_groups(self._streams.trajectories, 64, 1.0)
            now = time.perf_counter()
            for entry in entries:
                passed.finished.append(now)
                passed.tokens.append(sum(_check_trajectory(t) for t in entry.message.trajectories))
            self._streams.discard(self._streams.trajectories, [entry.id for entry in entries])
            if now - passed.began > 600:
                sys.exit(f"{len(uids) - len(passed.finished)} groups did not come: see {self.settings.run.folder}/logs")
        return passed

    def _issue(self, uid: str, samples: int, position: int) -> None:
        prompt = pb.Prompt(
            run_id=self.settings.run.id,
            group_uid=uid,
            data_source=plan.DATA_SOURCE,
            messages=[pb.ChatMessage(role="user", content=plan.build_question(uid))],
            ground_truth=pb.GroundTruth(targets=["none"]),
            samples=samples,
            sampling=pb.Sampling(temperature=1.0, seed=1 + position * samples),
            batch=self._batch,
            position=position,
            issued_unix_ms=int(time.time() * 1000),
        )
        self._streams.issue(prompt)

    def update(self, version: int) -> float:
        """Publish the same weights as another version. Returns the seconds that generation paused for it."""
        before, policy = read_metrics(self.settings), self._streams.read_policy()
        assert policy is not None
        policy.version = version
        self._streams.publish(policy)
        deadline = time.monotonic() + 60
        while True:
            time.sleep(0.2)
            now = read_metrics(self.settings)
            if now["forage_rollout_policy_version"] == version:
                break
            if time.monotonic() > deadline:
                sys.exit(f"version {version} was not served: see {self.settings.run.folder}/logs")
        name = "forage_rollout_policy_pause_seconds_total"
        return now[name] - before[name]


def read_metrics(settings: Settings) -> dict[str, float]:
    """Read the rollout service's unlabelled samples by name."""
    with urllib.request.urlopen(f"http://{settings.rollout.health_address}/metrics", timeout=20) as page:
        text = page.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in samples if not sample.labels}


def _check_trajectory(trajectory: Trajectory) -> int:
    row = plan.Row(trajectory.group_uid, trajectory.sample)
    assert trajectory.status == pb.STATUS_OK, trajectory.status_detail
    assert trajectory.score.status == pb.STATUS_OK
    sampled = trajectory.counts.sampled
    assert (sampled, len(trajectory.turns)) == (sum(row.lengths), len(row.lengths)), trajectory.id
    return sampled


@contextmanager
def start_rollout_service(settings: Settings, spinner: Status) -> Iterator[Service]:
    """Serve until the block ends; a retriever must be there already."""
    shutil.rmtree(settings.run.folder, ignore_errors=True)
    here = str(Path(__file__).resolve().parent)  # holds the environment
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    stack = Stack(settings, RUNNING)
    stack.start()
    try:
        settings = stack.log_in(Role.TRAINER)
        StreamClient(settings.redis, settings.run.id).create_groups()
        publish(settings, settings.model.path)
        wait_until_ready(stack, spinner)
        yield Service(settings)
    finally:
        stack.stop()


def free_base_port() -> int:
    """A port from which the next 50 are free."""
    for base in range(22000, 32000, 50):
        probes = [socket.socket() for _ in range(50)]
        try:
            if all(probe.connect_ex(("127.0.0.1", base + offset)) for offset, probe in enumerate(probes)):
                return base
        finally:
            for probe in probes:
                probe.close()
    sys.exit("no free range of 50 ports")
