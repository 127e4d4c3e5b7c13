"""The loop in one process, on a random Qwen2 and a real server: what dies, fills up or is replaced loses nothing."""

from __future__ import annotations

import errno
import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from key_pairs import make_keys
from trainer_parts import ScriptedRollout, read_lines
from training_loop import BATCH, model, read_metrics, train
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import Policy, Prompt, Purpose, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_queue.trainer.batcher import Batch
from forage_runtime.errors import FencedError, UserError
from forage_runtime.files.remote import StorageError
from forage_runtime.settings import RedisSettings, Settings
from forage_trainer.checkpoints import checkpoint
from forage_trainer.step import PolicyStep
from forage_weights.announcement import Admission
from forage_weights.folders import open_whole
from forage_weights.signed_folder import verify_published
from forage_weights.trainer.publisher import PolicyStore

__all__ = ["model", "train"]


def test_ppo_updates_actor_and_critic_and_resumes(train: Callable[..., Settings]) -> None:
    ppo = ["trainer.algorithm.adv_estimator=gae", "trainer.actor.ppo_mini_batch_size=1", "trainer.critic_warmup=1"]
    ppo += ["trainer.critic.optim.lr=0.01"]
    train(*ppo, "trainer.total_training_steps=2")
    result = read_metrics(train(*ppo, "trainer.total_training_steps=4"))
    assert ["loss" in line for line in result] == [False, True, True, True], "the critic learns first, alone"
    assert all(line["critic/grad_norm"] > 0 for line in result)
    assert all(line["seconds"]["values"] > 0 < line["seconds"]["critic"] for line in result)
    # A head of zeros gives values of 0; a restarted trainer has the head that the first one trained.
    assert [line["critic/values/max"] == 0 for line in result] == [True, False, False, False]


@pytest.mark.parametrize("steps", [1, 2], ids=["the only one", "the newest one"])
def test_a_damaged_checkpoint_costs_one_interval(train: Callable[..., Settings], steps: int) -> None:
    settings = train("trainer.save_freq=1", f"trainer.total_training_steps={steps}")
    weights = settings.run.folder / f"checkpoints/step_{steps}/state/model/part_rank_0.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    epoch = StreamClient(settings.redis, settings.run.id).read_policy().epoch
    settings = train("trainer.save_freq=1", "trainer.total_training_steps=3")
    read_metrics(settings)
    streams = StreamClient(settings.redis, settings.run.id)
    assert {step: len(entry.group_uids) for step, entry in streams.read_ledger().items()} == dict.fromkeys(
        (1, 2, 3), BATCH
    )
    assert streams.read_policy().epoch == epoch + 1
    assert streams.count_backlog(streams.trajectories) == 0


def test_a_signed_run_resumes_from_its_own_checkpoints_alone(train: Callable[..., Settings], tmp_path: Path) -> None:
    keys, audit = make_keys(tmp_path / "keys"), tmp_path / "audit.jsonl"
    files = {"signing_key_file": keys.signing_key_file, "verify_key_file": keys.verify_key_file, "audit_file": audit}
    signed = ["security.require_signed=true", *(f"security.{name}={file}" for name, file in files.items())]
    train(*signed, "trainer.save_freq=1", "trainer.total_training_steps=1")
    settings = train(*signed, "trainer.save_freq=1", "trainer.total_training_steps=2")
    policy = StreamClient(settings.redis, settings.run.id).read_policy()
    assert policy is not None
    Admission(settings).check(policy)
    assert verify_published(Path(policy.uri), open_whole(Path(policy.uri)), settings.security)
    acts = [line["act"] for line in read_lines(audit)]
    assert acts == ["start_run", *2 * ["publish_policy"], "restore_checkpoint", *2 * ["publish_policy"]]
    manifest = settings.run.folder / "checkpoints/step_2/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"figures": {}}))
    with pytest.raises(UserError, match=r"step_2 is not what the key .* has signed for run"):
        train(*signed, "trainer.total_training_steps=3")


def test_a_run_that_redis_remembers_and_no_checkpoint_holds_is_refused(train: Callable[..., Settings]) -> None:
    settings = train("trainer.total_training_steps=1")
    shutil.rmtree(settings.run.folder)
    with pytest.raises(
        UserError, match=r"acknowledged up to step 1 in Redis, but .* no checkpoint: give another run.id"
    ):
        train("trainer.total_training_steps=2")


def test_epochs_continue_where_redis_lost_them(train: Callable[..., Settings]) -> None:
    settings = train("trainer.total_training_steps=1")
    streams = StreamClient(settings.redis, settings.run.id)
    first = streams.read_policy().epoch
    streams._redis.flushall()
    train("trainer.total_training_steps=2")
    assert streams.read_policy().epoch == first + 1


@pytest.mark.parametrize("action", ["rollback", "stop"])
def test_a_superseded_trainer_rolls_nothing_back(
    action: str, train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may stand still in a step for as long as it likes, and find only then that its guard trips."""
    real = PolicyStep.__call__

    def step(self: PolicyStep, batch: Batch, policy: Policy, *rest: object) -> dict[str, object]:
        metrics = real(self, batch, policy, *rest)  # type: ignore[arg-type]
        StreamClient(settings.redis, settings.run.id).acquire_epoch(policy.epoch)
        return metrics | {"loss": math.nan}

    settings = train("trainer.total_training_steps=1", "trainer.save_freq=1")
    folder = settings.run.folder
    before = {file: file.read_bytes() for file in (folder / "checkpoints/groups").iterdir()}
    monkeypatch.setattr(PolicyStep, "__call__", step)
    with pytest.raises(FencedError):
        train("trainer.total_training_steps=2", f"trainer.guards.actions.non_finite={action}")
    assert not (folder / "rollbacks.json").exists()
    assert len(read_lines(folder / "metrics.jsonl")) == 1
    assert {file: file.read_bytes() for file in (folder / "checkpoints/groups").iterdir()} == before


def test_a_full_stream_makes_the_trainer_save_after_every_step(train: Callable[..., Settings]) -> None:
    settings = train("redis.max_stream_bytes=1", "trainer.save_freq=9", "trainer.max_ckpt_to_keep=9")
    folder = settings.run.folder / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_1", "step_2", "step_3"]


class HeldRollout(ScriptedRollout):
    """Leaves the last prompt of batch 2 until the groups of batch 1 are gone, as backpressure does on a full stream."""

    def _is_ready(self, prompt: Prompt, policy: Policy) -> bool:
        is_last = prompt.purpose == Purpose.PURPOSE_TRAIN and (prompt.batch, prompt.position) == (2, 1)
        is_free = not is_last or self._streams.count_backlog(self._streams.trajectories) == 1
        return super()._is_ready(prompt, policy) and is_free


def test_a_stream_that_gets_full_while_a_batch_is_awaited_is_emptied(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamClient, "measure_bytes", StreamClient.count_backlog)  # a byte for each group
    limits = ["redis.max_stream_bytes=3", "trainer.max_staleness=0", "trainer.batch_timeout_s=300"]
    settings = train(
        *limits, "trainer.save_freq=9", "trainer.total_training_steps=2", "trainer.test_freq=0", rollout=HeldRollout
    )
    assert list(StreamClient(settings.redis, settings.run.id).read_ledger()) == [1, 2]
    assert (settings.run.folder / "checkpoints/step_1").is_dir()


def test_a_superseded_trainer_names_no_checkpoint(
    train: Callable[..., Settings], redis_server: RedisSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may still be at work on one when its successor begins."""
    real = checkpoint.compute_digests

    def compute(folder: Path) -> dict[str, str]:
        StreamClient(redis_server, "local").acquire_epoch()
        return real(folder)

    monkeypatch.setattr(checkpoint, "compute_digests", compute)
    with pytest.raises(FencedError):
        train("trainer.total_training_steps=1", "trainer.val_before_train=false", "run.id=local")
    checkpoints = tmp_path / "runs/local/checkpoints"
    assert [path.name for path in checkpoints.iterdir() if path.name != "groups"] == []


def test_a_checkpoint_that_finds_no_room_beside_the_next_step_costs_nothing(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, folders = checkpoint.compute_digests, []

    def compute(folder: Path) -> dict[str, str]:
        folders.append(folder)
        if len(folders) in (1, 3):  # beside step 2, and that of the last step
            raise OSError(errno.ENOSPC, "full")
        return real(folder)

    monkeypatch.setattr(checkpoint, "compute_digests", compute)
    monkeypatch.setattr("forage_runtime.retries._DISK_INTERVAL_S", 0.05)
    settings = train("trainer.save_freq=1", "trainer.val_before_train=false", "trainer.test_freq=0")
    assert list(StreamClient(settings.redis, settings.run.id).read_ledger()) == [1, 2, 3]
    assert len(folders) == 4
    assert {path.name for path in (settings.run.folder / "checkpoints").glob("step_*")} == {"step_2", "step_3"}


def test_groups_of_another_environment_are_not_trained_on(
    train: Callable[..., Settings], redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_trainer.data.routes._PATIENCE_S", 0.1)
    monkeypatch.setattr("forage_trainer.data.routes._PAUSE_S", 0.02)
    streams = StreamClient(redis_server, "other")
    streams.declare_environments({"world_facts": "single_turn"})
    streams._redis.persist(streams.key("environments"))  # however late the trainer looks
    with pytest.raises(UserError, match="'world_facts' gets the environment 'single_turn' from the rollout service"):
        train("run.id=other", "trainer.val_before_train=false")
    assert streams.read_ledger() == {}


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_policy_is_published_beside_the_next_step(
    train: Callable[..., Settings], redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """That of step 1 is not complete before step 2 has begun; prompts that it allows wait for it."""
    begun, issued_before = threading.Event(), []
    real_complete, real_step = PolicyStore.complete, PolicyStep.__call__

    def complete(self: PolicyStore, name: str, check: Callable[[], object]) -> None:
        if name.startswith("v1-"):
            assert begun.wait(WAIT_S)
            streams = StreamClient(redis_server, "local")
            issued_before.extend(issue.batch for issue in streams.read_issued())
        real_complete(self, name, check)

    def step(self: PolicyStep, batch: Batch, *rest: object) -> dict[str, object]:
        if batch.number == 2:
            begun.set()
        return real_step(self, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PolicyStore, "complete", complete)
    monkeypatch.setattr(PolicyStep, "__call__", step)
    overlapping = ["trainer.val_before_train=false", "trainer.save_freq=9", "trainer.total_training_steps=5"]
    settings = train(*overlapping, f"trainer.max_staleness={staleness}", "run.id=local")
    assert begun.is_set()
    assert set(issued_before) == set(range(1, staleness + 2)), "what comes later needs version 1"
    lines = read_metrics(settings)
    assert all(line["weights_digest"] and line["publish_bytes"] for line in lines)
    assert len({line["weights_digest"] for line in lines}) == 5
    assert list(StreamClient(settings.redis, settings.run.id).read_ledger()) == [1, 2, 3, 4, 5]


def test_a_trainer_that_is_superseded_while_it_publishes_acknowledges_nothing(
    train: Callable[..., Settings], redis_server: RedisSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PolicyStore.complete
    streams = StreamClient(redis_server, "local")

    def complete(self: PolicyStore, name: str, check: Callable[[], object]) -> None:
        if name.startswith("v1-"):
            streams.acquire_epoch()
        real(self, name, check)

    monkeypatch.setattr(PolicyStore, "complete", complete)
    with pytest.raises(FencedError):
        train("trainer.val_before_train=false", "trainer.save_freq=2", "run.id=local")
    assert streams.read_ledger() == {}
    assert list((tmp_path / "runs/local/checkpoints").glob("step_*")) == []
    announced = streams.read_policy()
    assert announced is not None
    assert announced.version == 0


def test_a_run_that_fails_while_a_store_is_away_ends(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PolicyStep.__call__

    def complete(self: PolicyStore, name: str, check: Callable[[], object]) -> None:
        if name.startswith("v1-"):
            self._retry(lambda: put_files("s3://no-such-bucket/x", {}))

    def step(self: PolicyStep, batch: Batch, *rest: object) -> dict[str, object]:
        if batch.number == 2:
            raise RuntimeError("the step failed")
        return real(self, batch, *rest)  # type: ignore[arg-type]

    def put_files(*_: object) -> None:
        raise StorageError("away")

    monkeypatch.setattr(PolicyStore, "complete", complete)
    monkeypatch.setattr(PolicyStep, "__call__", step)
    with pytest.raises(RuntimeError, match="the step failed"):
        train("trainer.val_before_train=false", "trainer.save_freq=9")


def test_what_redis_forgets_of_the_place_of_files_is_announced_again(train: Callable[..., Settings]) -> None:
    class Forgetting(ScriptedRollout):
        """Redis loses the mark of the trainer's place before the second batch is answered."""

        marks: ClassVar[list[bytes | None]] = []

        def _answer(self, prompt: Prompt, policy: Policy) -> TrajectoryGroup | None:
            if prompt.purpose == Purpose.PURPOSE_TRAIN and prompt.position == 0:
                key = self._streams.key("payloads")
                self.marks.append(self._streams._redis.get(key))
                self._streams._redis.delete(key)
            return super()._answer(prompt, policy)

    train("trainer.total_training_steps=3", "trainer.max_staleness=0", rollout=Forgetting)
    assert len(Forgetting.marks) == 3
    assert None not in Forgetting.marks
    assert len(set(Forgetting.marks)) == 1
