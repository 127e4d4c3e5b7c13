"""A random walk over both ends of the streams, with deaths, lies and losses, on a real server.

After every walk the run must end: each position of each batch trained exactly once, by the step of an undisturbed run
or, with trainer.batching=ready, by any; each step in the ledger as it is in the weights, and each validation with all
its answers. The walk is recorded, and its history must hold too.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis_process import RedisProcess
from trainer_parts import make_group
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import GroundTruth, Policy, Prompt
from forage_queue.checker.check import Limits, check_operations
from forage_queue.checker.operations import read_history
from forage_queue.streams import payloads
from forage_queue.streams.client import GROUP, VALIDATION, Entry, StreamClient
from forage_queue.streams.history import open_history
from forage_queue.streams.payloads import FOLDER, Payloads
from forage_queue.trainer.batcher import LOST, Batcher, BatchTimeoutError, ConsumedStep, UnackedSteps
from forage_queue.trainer.feeder import Batches, Feeder
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_queue.trainer.slots import SlotsOfSteps
from forage_records.questions import Question
from forage_runtime.errors import FencedError
from forage_runtime.retries import Retries
from forage_runtime.settings import Settings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.checkpoints.manifest import Manifest
from forage_trainer.checkpoints.start import list_settled, match_order
from forage_trainer.reporting.progress import StateFile
from forage_trainer.validation.evaluation import Validation
from forage_trajectory.codec import pack_group

SIZE, STEPS, KEPT = 2, 5, 2
QUESTIONS = tuple(Question("q", "train", i, (), GroundTruth(targets=[str(i)]), str(i)) for i in range(20))
BATCHES = Batches(QUESTIONS, SIZE, 0)
Weights = dict[int, list[str]]
"""What the policy has learned from: step → uids."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, and whether it can still be read."""

    weights: Weights
    pending: tuple[ConsumedStep, ...]
    epoch: int
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return len(self.weights)


@dataclass(eq=False)
class Trainer:
    """The trainer's process around its step: real feeder, batcher, pending steps, kept groups, validation."""

    settings: Settings
    disk: dict[int, Checkpoint]
    published: list[int]
    """The epochs of the policies on the disk."""
    writing: Checkpoint | None = None
    weights: Weights = field(default_factory=dict)

    def __post_init__(self) -> None:
        history = open_history(self.settings.run, "trainer")
        self.streams = StreamClient(self.settings.redis, "test", WAIT_S, history, Payloads(self.settings))
        retries, health = Retries(Stop(), Health()), Health()
        retry = retries.redis
        self.kept = ReplayGroups(self.settings.run.folder / "groups")
        self.feeder = Feeder(self.settings, self.streams, BATCHES, retry, lambda group: False)
        self.batcher = Batcher(self.streams, SIZE, self.settings.trainer, self.feeder, retry, health)
        self.pending = UnackedSteps(self.streams, retry)
        self.validation = Validation(
            self.settings, self.streams, QUESTIONS[:2], StateFile(self.settings.run.folder), retries, health
        )
        self.streams.create_groups()
        newest = self.disk.get(max(self.disk, default=0), Checkpoint({}, (), 0))
        self.streams.acquire_epoch(max([0, *self.published, *(c.epoch for c in self.disk.values())]))
        ledger = self.streams.read_ledger()
        self.replay_until = max(ledger, default=0)
        again = range(newest.step + 1, self.replay_until + 1)
        assert self.kept.has(again), "it could not go back"
        replayed: SlotsOfSteps = {}
        if self.settings.trainer.batching == "ready":
            manifest = Manifest(newest.step, newest.epoch, "", (), {}, {}, 1, dict(newest.parts))
            match_order(self.settings, manifest)
            manifest.restore_parts(self.feeder.parts)
            replayed = list_settled(self.kept, self.streams, retry, again)
        self.weights = copy.deepcopy(newest.weights)
        self.pending._pending = [step for step in newest.pending if step.step not in ledger]
        self.publish()
        self.streams.offer_payloads()
        self.batcher.forget(self.pending.acknowledge(newest.step), newest.step)
        self.batcher.start(max(newest.step, self.replay_until), replayed)

    @property
    def step(self) -> int:
        return len(self.weights)

    def publish(self) -> None:
        self.published.append(self.streams.epoch)
        self.streams.publish(Policy(version=self.step, epoch=self.streams.epoch))

    def train(self) -> None:
        """Take the next step if its batch is complete."""
        number = self.step + 1
        if number > STEPS:
            return
        self.feeder.issue_up_to_bound(self.step)
        batch = self.kept.read(number) if number <= self.replay_until else self.batcher.next_batch(number, 0.02)
        self.weights[number] = [group.group_uid for group in batch.groups]
        if number > self.replay_until:
            self.pending.add(batch, self.streams.epoch, ())
            self.batcher.mark_consumed(number)
            self.kept.write(batch)
        self.publish()

    def begin_checkpoint(self) -> None:
        """What is written is not on the disk yet."""
        self.settle_checkpoint(dies=False)
        parts = {name: part.state_dict() for name, part in self.feeder.parts.items()}
        self.writing = Checkpoint(copy.deepcopy(self.weights), self.pending.steps, self.streams.epoch, parts)

    def settle_checkpoint(self, dies: bool) -> None:
        """It is now, and more steps may have been taken meanwhile."""
        if self.writing is None:
            return
        saved, self.writing = self.writing, None
        self.disk[saved.step] = saved
        for old in sorted(self.disk)[:-KEPT]:
            del self.disk[old]
        if dies:
            raise KilledError
        self.batcher.forget(self.pending.acknowledge(saved.step), saved.step)
        self.kept.prune(min(self.disk) if len(self.disk) > 1 else 0)


class KilledError(Exception):
    """The process died here."""


class DeliveryMachine(RuleBasedStateMachine):
    """The walk. Its attributes are set by the test."""

    server: RedisProcess
    folder: Path
    batching: str

    @initialize(losses=st.booleans(), files=st.booleans())
    def begin(self, losses: bool, files: bool) -> None:
        """
        Args:
            losses: whether groups may be lost in this walk. Where none are, none may be sampled a second time.
            files: whether groups are in files beside Redis.
        """
        self.server.flush()
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        overrides = [f"redis.url={self.server.settings.url}", f"run.dir={self.folder / 'runs'}", "run.id=test"]
        overrides += [
            "run.record_history=true",
            "redis.reclaim_idle_s=0.001",
            f"redis.inline_bytes={0 if files else 'null'}",
            "trainer.batch_timeout_s=0.02",
            f"data.train_batch_size={SIZE}",
            f"trainer.batching={self.batching}",
            f"trainer.total_training_steps={STEPS}",
        ]
        self.settings = load_settings(None, overrides, {})
        history = open_history(self.settings.run, "worker")
        self.worker = StreamClient(self.settings.redis, "test", WAIT_S, history, Payloads(self.settings))
        self.worker.create_groups()
        self.torn = self.emptied = False
        self.losses = losses
        self.lost = LOST._value.get()
        self.published: list[int] = []
        self.claimed: list[Entry[Prompt]] = []
        self.disk: dict[int, Checkpoint] = {}
        self.trainers: list[Trainer] = []
        self.start_another()

    # The trainers; the last one is the latest, unless that was killed.

    def run_trainer(self, index: int, work: Callable[[Trainer], Any]) -> None:
        """Let a trainer work; it ends where it is fenced or killed."""
        trainer = self.trainers[index % len(self.trainers)]
        try:
            with suppress(BatchTimeoutError):
                work(trainer)
        except FencedError:
            assert trainer.streams.epoch < max(self.published), "the latest trainer is never fenced"
            self.replace(trainer)
        except KilledError:
            self.replace(trainer)

    def replace(self, trainer: Trainer) -> None:
        self.trainers.remove(trainer)
        if not self.trainers:
            self.start_another()

    @precondition(lambda self: len(self.trainers) < 3)
    @rule()
    def start_another(self) -> None:
        before = max(self.published, default=0)
        self.trainers.append(Trainer(self.settings, self.disk, self.published))
        assert self.trainers[-1].streams.epoch > before

    @rule(index=st.integers(0, 2))
    def kill_trainer(self, index: int) -> None:
        self.replace(self.trainers[index % len(self.trainers)])

    @rule(index=st.integers(0, 2))
    def train(self, index: int) -> None:
        self.run_trainer(index, Trainer.train)

    @rule(index=st.integers(0, 2))
    def begin_checkpoint(self, index: int) -> None:
        self.run_trainer(index, Trainer.begin_checkpoint)

    @rule(index=st.integers(0, 2), dies=st.booleans())
    def settle_checkpoint(self, index: int, dies: bool) -> None:
        self.run_trainer(index, lambda trainer: trainer.settle_checkpoint(dies))

    @rule(index=st.integers(0, 2), label=st.sampled_from(["step", "after"]))
    def validate(self, index: int, label: str) -> None:
        def work(trainer: Trainer) -> None:
            if not trainer.validation.open_versions:
                policy = Policy(version=trainer.step, epoch=trainer.streams.epoch)
                trainer.validation.begin(label if label == "after" else f"step-{trainer.step}", policy)
            trainer.validation.poll()

        self.run_trainer(index, work)

    @rule(index=st.integers(0, 2), count=st.integers(1, 3))
    def lose_a_delivery(self, index: int, count: int) -> None:
        self.run_trainer(index, lambda t: t.streams.claim_groups(t.streams.trajectories, count, 0.0))

    @precondition(lambda self: len(self.disk) > 1)
    @rule()
    def damage_the_newest_checkpoint(self) -> None:
        """Only seen by the next process; a process that runs goes on."""
        del self.disk[max(self.disk)]
        for trainer in list(self.trainers):
            self.trainers.remove(trainer)
        self.start_another()

    @invariant()
    def trained_groups_stay_until_their_checkpoint(self) -> None:
        if getattr(self, "losses", True) or not self.trainers:
            return
        redis, stream = self.worker._redis, self.worker.trajectories
        for step in self.trainers[-1].pending.steps:
            for consumed in step.groups:
                assert redis.xrange(stream, consumed.entry, consumed.entry), "deleted before it was safe"

    # The workers: any may finish what any has claimed.

    @rule(count=st.integers(1, 8))
    def work(self, count: int) -> None:
        for entry in self.worker.claim_prompts("worker", count, 0.0):
            self.answer(entry)

    @rule(index=st.integers(0, 2), steps=st.integers(1, 2), saves=st.booleans())
    def run_on(self, index: int, steps: int, saves: bool) -> None:
        """An undisturbed stretch: without it few walks would get anywhere."""
        for _ in range(steps):
            self.run_trainer(index, lambda trainer: trainer.feeder.issue_up_to_bound(trainer.step))
            self.work(100)
            self.run_trainer(index, Trainer.train)
        if saves:
            self.run_trainer(index, Trainer.begin_checkpoint)
            self.run_trainer(index, lambda trainer: trainer.settle_checkpoint(dies=False))

    @rule(count=st.integers(1, 4))
    def claim(self, count: int) -> None:
        self.claimed += self.worker.claim_prompts("worker", count, 0.0)

    @rule()
    def reclaim(self) -> None:
        self.claimed += self.worker.reclaim_prompts("another worker", 10)

    @rule()
    def take_over(self) -> None:
        self.claimed += self.worker.take_over_prompts("worker", 10)

    @precondition(lambda self: self.claimed)
    @rule(index=st.integers(0, 9), again=st.booleans())
    def finish(self, index: int, again: bool) -> None:
        entry = self.claimed[index % len(self.claimed)]
        if not again:
            self.claimed.remove(entry)
        self.answer(entry)

    def answer(self, entry: Entry[Prompt]) -> None:
        """Answer under the announced policy; a prompt that asks for a later one is left to be reclaimed."""
        asked = entry.message
        policy = self.worker.read_policy()
        if policy is None or policy.version < asked.min_policy_version:
            return
        reply = make_group(
            asked.group_uid, [0.0, 1.0], asked.batch, asked.position, asked.attempt, version=policy.version
        )
        for trajectory in reply.trajectories:
            for segment in trajectory.segments:
                segment.epoch = policy.epoch
        self.worker.finish(entry, pack_group(reply))

    def lose_data(self) -> AbstractContextManager[object]:
        """Tell the history that the server loses what it has acknowledged."""
        assert self.worker.history is not None
        return self.worker.history.record("lose_data", {})

    @precondition(lambda self: self.losses and self.claimed)
    @rule()
    def garble_a_group(self) -> None:
        entry = self.claimed.pop()
        redis = self.worker._redis
        if redis.xack(self.worker.prompts, GROUP, entry.id):
            redis.xdel(self.worker.prompts, entry.id)
            redis.xadd(entry.message.reply_stream, {"p": b"\xff\xff"})

    @precondition(lambda self: self.losses and self.list_files())
    @rule(index=st.integers(0, 9), is_deletion=st.booleans())
    def damage_a_file(self, index: int, is_deletion: bool) -> None:
        file = self.list_files()[index % len(self.list_files())]
        with self.lose_data():
            file.unlink() if is_deletion else file.write_bytes(b"?" + file.read_bytes()[1:])

    def list_files(self) -> list[Path]:
        """The files that groups are in."""
        return sorted((self.settings.run.folder / FOLDER).glob("*/*"))

    @rule()
    def forget_claims(self) -> None:
        self.claimed = []

    # The server and what others write to it.

    @rule(batch=st.integers(1, STEPS), position=st.integers(0, SIZE))
    def forge(self, batch: int, position: int) -> None:
        forged = make_group("q/train/999/0", [0.0, 1.0], batch, position)
        self.worker._redis.xadd(self.worker.trajectories, {"p": pack_group(forged).SerializeToString()})

    @rule(of=st.sampled_from(["prompts", "trajectories"]))
    def garble(self, of: str) -> None:
        self.worker._redis.xadd(self.worker.key(of), {"m" if of == "prompts" else "p": b"\xff\xff"})

    @precondition(lambda self: self.losses)
    @rule(label=st.sampled_from(["step-0", "step-1", "after"]))
    def drop_a_validation_stream(self, label: str) -> None:
        with self.lose_data():
            self.worker._redis.delete(self.worker.key(f"validation-{label}"))

    @precondition(lambda self: self.losses and not self.torn)
    @rule(size=st.integers(1, 12))
    def tear_the_last_record(self, size: int) -> None:
        """A power failure: the last write that was answered is lost."""
        self.torn = True  # once a walk: it takes a while
        with self.lose_data():
            self.server.tear(size)

    @precondition(lambda self: self.losses and not self.emptied)
    @rule()
    def empty_the_server(self) -> None:
        """A lost volume."""
        self.emptied = True
        with self.lose_data():
            self.server.flush()

    def end_validations(self, trainer: Trainer) -> None:
        """End those that a trainer left open when it died: a later one validates these versions again."""
        for name in sorted({file.parent.name for file in self.list_files()}):
            label = name.removeprefix(VALIDATION)
            if name == label or label == "after":
                continue
            version = int(label.removeprefix("step-"))
            trainer.validation.begin(label, Policy(version=version, epoch=trainer.streams.epoch))
            for _ in range(20):
                for entry in [*self.worker.claim_prompts("w", 50, 0.0), *self.worker.reclaim_prompts("w", 50)]:
                    self.answer(entry)
                with suppress(BatchTimeoutError):
                    trainer.validation.finish()
                if not trainer.validation.open_versions:
                    break

    def teardown(self) -> None:
        """Let everybody work properly: the run must end, and be exact."""
        if not hasattr(self, "trainers"):
            return
        if self.trainers:
            self.trainers = [self.trainers[-1]]
        trainer = Trainer(self.settings, self.disk, self.published)
        done: set[str] = set()
        for _ in range(80):
            for entry in [*self.worker.claim_prompts("w", 50, 0.0), *self.worker.reclaim_prompts("w", 50)]:
                self.answer(entry)
            with suppress(BatchTimeoutError):
                trainer.train()
            trainer.begin_checkpoint()
            trainer.settle_checkpoint(dies=False)
            if not trainer.validation.open_versions and "after" not in done:
                trainer.validation.begin("after", Policy(version=trainer.step, epoch=trainer.streams.epoch))
            with suppress(BatchTimeoutError):
                trainer.validation.finish()
            if not trainer.validation.open_versions and trainer.step == STEPS:
                break
        expected = {step: [BATCHES.group(step, p)[0] for p in range(SIZE)] for step in range(1, STEPS + 1)}
        if self.batching == "ready":
            assert {step: len(uids) for step, uids in trainer.weights.items()} == dict.fromkeys(expected, SIZE)
            assert sorted(chain(*trainer.weights.values())) == sorted(chain(*expected.values())), "each once"
            expected = trainer.weights
        assert trainer.weights == expected, "trained as an undisturbed run"
        ledger = {step: list(entry.group_uids) for step, entry in trainer.streams.read_ledger().items()}
        assert ledger.items() <= expected.items() if self.emptied else ledger == expected, "and the ledger says so"
        assert self.losses or LOST._value.get() == self.lost, "nothing was sampled again without need"
        trainer.batcher.clear()
        assert trainer.streams.count_backlog(trainer.streams.trajectories) == 0
        assert not trainer.validation.open_versions, "every wait ends"
        self.end_validations(trainer)
        with patch.object(payloads, "ORPHAN_S", -60.0):
            trainer.streams._swept = -math.inf
            trainer.streams.delete_orphans()
        assert self.list_files() == []
        limits = Limits(SIZE, STEPS, max_staleness=1, batching=self.batching)
        report = check_operations(read_history(self.settings.run.folder), limits)
        assert report.violations == ()
        assert report.is_complete


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a disk: every write is synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def server(redis_binary: str, folder: Path, free_address: Callable[[], str]) -> Iterator[RedisProcess]:
    process = RedisProcess(redis_binary, folder / "redis", free_address().rpartition(":")[2])
    yield process
    process.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage_queue.trainer.batcher.SILENCE_S", 0.0)
    for module in ("forage_queue.trainer.batcher", "forage_trainer.validation.evaluation"):
        monkeypatch.setattr(f"{module}._BLOCK_S", 0.001)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batching", ["strict", "ready"])
def test_the_run_ends_exactly_after_any_walk(server: RedisProcess, folder: Path, batching: str) -> None:
    DeliveryMachine.server, DeliveryMachine.folder, DeliveryMachine.batching = server, folder, batching
    examples = int(os.environ.get("FORAGE_WALKS", "8"))
    run_state_machine_as_test(
        DeliveryMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # a walk depends on time too, so that it does not shrink
            print_blob=False,
            database=None,
        ),
    )
