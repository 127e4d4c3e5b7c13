"""The whole loop in one process, on a random Qwen2 and a real server: each algorithm takes real steps."""

from __future__ import annotations

import errno
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from key_pairs import make_keys
from redis import Redis
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions

from forage_common.errors import FencedError, UserError
from forage_common.settings import RedisSettings, Settings, load_settings
from forage_common.stop import Stop
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_common.v1.trajectory_pb2 import Policy, Prompt, Purpose, TrajectoryGroup
from forage_policies.admission import Admission
from forage_policies.digests import compute_digest
from forage_policies.folders import open_whole
from forage_policies.signed_folder import verify_published
from forage_policies.storage import StorageError
from forage_records.events import read_events
from forage_records.questions import read_questions
from forage_records.step_file import read_group_fates, step_file_path
from forage_trainer.checkpoints import checkpoint
from forage_trainer.data import arrivals
from forage_trainer.data.batcher import Batch, BatchTimeoutError
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.loop import TrainingLoop
from forage_trainer.step import PolicyStep
from forage_trainer.weights import publisher
from forage_trainer.weights.policy_store import PolicyStore

BATCH, SAMPLES = 2, 3


class TurnedRollout(ScriptedRollout):
    """Scores with turns: each sample's two turns earn differently."""

    def _answer(self, prompt: Prompt, policy: Policy) -> TrajectoryGroup | None:
        group = super()._answer(prompt, policy)
        assert group is not None
        for row in group.trajectories:
            row.turn_ids[:] = [1] * 6 + [-1] * 7 + [2] * 5
            for turn, part in ((1, 0.1 * row.sample), (2, 0.7 - 0.1 * row.sample)):
                row.score.components.add(name=f"turn_{turn}", raw=2 * part, weighted=part)
            row.score.components.add(name="answer", raw=1.0, weighted=float(row.sample == 0))
            row.score.total = 0.7 + float(row.sample == 0)
        return group


class PartialRollout(ScriptedRollout):
    """Answers nothing for the first place of batch 2, and with equal rewards whatever is asked first elsewhere."""

    unanswered_attempt = 0

    def _answer(self, prompt: Prompt, policy: Policy) -> TrajectoryGroup | None:
        place = prompt.batch, prompt.position, prompt.attempt
        if prompt.purpose == Purpose.PURPOSE_TRAIN and place == (2, 0, self.unanswered_attempt):
            return None
        group = super()._answer(prompt, policy)
        assert group is not None
        if prompt.attempt == 0:
            for row in group.trajectories:
                row.score.total = 1.0
        return group


class LateRefillRollout(PartialRollout):
    """The same, but it answers what is asked first there too: the question that takes its place has no answer."""

    unanswered_attempt = 1


class UnhurriedRollout(ScriptedRollout):
    """Leaves the questions of validations between steps for later."""

    later = threading.Event()

    def _is_ready(self, prompt: Prompt, policy: Policy) -> bool:
        between = prompt.purpose == Purpose.PURPOSE_VALIDATION and prompt.batch > 0
        return super()._is_ready(prompt, policy) and (self.later.is_set() or not between)


class RestartedRollout(ScriptedRollout):
    """Has to load policy 1 anew, when a bit of it has been flipped; serves only what is as it was announced."""

    damaged = False

    def _is_ready(self, prompt: Prompt, policy: Policy) -> bool:
        file = Path(policy.uri) / "model.safetensors"
        if policy.version == 1 and not self.damaged:
            self.damaged = True
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        return super()._is_ready(prompt, policy) and compute_digest(file) == policy.digest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("loop") / "model")


@pytest.fixture
def train(model: Path, tmp_path: Path, redis_server: RedisSettings) -> Iterator[Callable[..., Settings]]:
    """Run the trainer to its end; its settings say where everything is."""
    write_questions(tmp_path / "train.parquet", 10)
    write_questions(tmp_path / "test.parquet", 2, split="test")
    players: list[ScriptedRollout] = []

    def run(*overrides: str, rollout: type[ScriptedRollout] = ScriptedRollout) -> Settings:
        small = [
            f"run.dir={tmp_path / 'runs'}",
            f"redis.url={redis_server.url}",
            f"model.path={model}",
            f"data.train_files=[{tmp_path / 'train.parquet'}]",
            f"data.val_files=[{tmp_path / 'test.parquet'}]",
            f"data.train_batch_size={BATCH}",
            f"trainer.actor.ppo_mini_batch_size={BATCH}",
            f"rollout.n={SAMPLES}",
            "trainer.total_training_steps=3",
            "trainer.actor.optim.lr=0.001",
            "trainer.threads=1",
        ]
        settings = load_settings(None, [*small, *overrides], {})
        if not players:
            players.append(rollout(redis_server, settings.run.id))
            players[0].start()
        questions = read_questions(settings.data.train_paths), read_questions(settings.data.val_files)
        streams = StreamClient(settings.redis, settings.run.id)
        TrainingLoop(settings, streams, PolicyWorker(settings), *questions, 0, Stop(), Health()).run()
        return settings

    yield run
    for player in players:
        player.end()


def read_metrics(settings: Settings) -> list[dict[str, object]]:
    result = read_lines(settings.run.folder / "metrics.jsonl")
    assert [line["step"] for line in result] == list(range(1, settings.trainer.total_training_steps + 1))
    return result


def test_ppo_updates_actor_and_critic_and_resumes(train: Callable[..., Settings]) -> None:
    ppo = ["trainer.algorithm.adv_estimator=gae", "trainer.critic.ppo_mini_batch_size=1", "trainer.critic_warmup=1"]
    ppo += ["trainer.critic.optim.lr=0.01"]
    train(*ppo, "trainer.total_training_steps=2")
    result = read_metrics(train(*ppo, "trainer.total_training_steps=4"))
    assert ["loss" in line for line in result] == [False, True, True, True], "the critic learns first, alone"
    assert all(line["critic/grad_norm"] > 0 for line in result)
    assert all(line["seconds"]["values"] > 0 < line["seconds"]["critic"] for line in result)
    # A head of zeros gives values of 0; a restarted trainer has the head that the first one trained.
    assert [line["critic/values/max"] == 0 for line in result] == [True, False, False, False]


def test_a_damaged_policy_that_no_engine_can_load_is_published_again(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arrivals, "SILENCE_S", 0.5)
    monkeypatch.setattr(publisher, "LIVELY_S", -1)  # no replica gives a sign of life
    wait = ["trainer.max_staleness=0", "trainer.batch_timeout_s=20"]
    read_metrics(train(*wait, rollout=RestartedRollout))
    assert "policy_published_again" in capsys.readouterr().out


def test_multi_turn_grpo_steps_on_scores_with_turns(train: Callable[..., Settings]) -> None:
    settings = train(
        "trainer.algorithm.adv_estimator=grpo_multiturn", "trainer.rollout_data_freq=2", rollout=TurnedRollout
    )
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in read_metrics(settings))
    kept = step_file_path(settings.run.folder, 2)
    assert list(kept.parent.iterdir()) == [kept], "the trajectories of every second step are kept"
    rows = pq.read_table(kept).to_pylist()
    assert len(rows) == BATCH * SAMPLES
    for row in rows:
        first, between, second = row["advantages"][:6], row["advantages"][6:13], row["advantages"][13:]
        assert len(set(first)) == len(set(second)) == 1
        assert first[0] != second[0]
        assert not any(between)


def test_the_kl_coefficient_adapts_and_survives_a_restart(
    train: Callable[..., Settings],
) -> None:
    kl = ["trainer.algorithm.use_kl_in_reward=true", "trainer.actor.use_kl_loss=false"]
    kl += ["trainer.algorithm.kl_ctrl.type=adaptive", "trainer.algorithm.kl_ctrl.horizon=60"]
    kl += ["trainer.algorithm.kl_ctrl.kl_coef=0.1", "trainer.algorithm.kl_ctrl.target_kl=1000"]
    train(*kl, "trainer.total_training_steps=2")
    result = read_metrics(train(*kl, "trainer.total_training_steps=4"))
    # Far below its target the KL lowers the coefficient by 0.2 * rows / horizon a step.
    lower = 1 - 0.2 * BATCH * SAMPLES / 60
    assert [line["kl_reward_coef"] for line in result] == pytest.approx([0.1 * lower**n for n in range(4)])
    assert result[0]["kl_reward"] == pytest.approx(0, abs=1e-5)
    assert result[-1]["kl_reward"] != result[0]["kl_reward"]


def test_trackers_receive_every_step_and_validation(train: Callable[..., Settings]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = train("trainer.logger=[tensorboard]", "trainer.test_freq=2")
    events = EventAccumulator(str(settings.run.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("actor/grad_norm")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("val-core/world_facts/em/mean@1")] == [0, 2, 3]


def test_an_overlapped_validation_survives_a_restart_and_its_checkpoint_is_kept(
    train: Callable[..., Settings],
) -> None:
    beside = ["trainer.validation_mode=overlapped", "trainer.test_freq=2", "trainer.total_training_steps=4"]
    beside += ["trainer.max_ckpt_to_keep=1", "trainer.save_freq=1", "trainer.batch_timeout_s=5"]
    UnhurriedRollout.later.clear()
    with pytest.raises(BatchTimeoutError, match="validation 'step-2': 2 of 2 answers missing"):
        train(*beside, rollout=UnhurriedRollout)
    UnhurriedRollout.later.set()
    settings = train(*beside)
    read_metrics(settings)
    result = json.loads((settings.run.folder / "validation" / "step-2.json").read_text())
    assert (result["version"], result["count"], result["later_version_share"]) == (2, 2, 1.0)
    checkpoints = settings.run.folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "groups", "latest", "step_2", "step_4"]
    assert (checkpoints / "best").read_text() == "step_2\n"


@pytest.mark.parametrize("rollout", [PartialRollout, LateRefillRollout])
def test_dropped_groups_are_in_the_ledger_and_refills_are_counted(
    train: Callable[..., Settings], rollout: type[PartialRollout]
) -> None:
    drop = ["trainer.straggler_timeout_s=2", "trainer.partial_groups=drop", "trainer.max_staleness=0"]
    refill = ["trainer.algorithm.filter_groups=true", "trainer.max_refills=1"]
    settings = train(*drop, *refill, "trainer.rollout_data_freq=1", rollout=rollout)
    result = read_metrics(settings)
    assert [line["dropped_stragglers"] for line in result] == [0, 1, 0]
    assert [line["refilled_groups"] for line in result] == [2, 1, 2]
    assert [line["filtered_groups"] for line in result] == [0, 0, 0]
    assert [line["trajectories"] for line in result] == [6, 3, 6]
    assert all(line["grad_norm"] > 0 for line in result)
    ledger = StreamClient(settings.redis, settings.run.id).read_ledger()
    issues = StreamClient(settings.redis, settings.run.id).read_issued()
    asked = [issue.group_uid for issue in issues if (issue.batch, issue.position) == (2, 0)]
    assert len(asked) == rollout.unanswered_attempt + 1
    missing = asked[-1]
    fates = read_group_fates(step_file_path(settings.run.folder, 2)) or []
    late = [fate.uid for fate in fates if fate.reason == "straggler: it did not arrive in time"]
    assert late == [missing]
    assert [fate.fate for fate in fates if fate.position == 1] == ["dropped", "trained"], "refilled, then trained on"
    assert [list(ledger[step].dropped_group_uids) for step in (1, 2, 3)] == [[], [missing], []]
    assert [len(ledger[step].group_uids) for step in (1, 2, 3)] == [2, 1, 2]
    streams = StreamClient(settings.redis, settings.run.id)
    assert [streams.count_backlog(name) for name in (streams.prompts, streams.trajectories)] == [0, 0]


@pytest.mark.parametrize("mode", ["paused", "overlapped"])
def test_watched_questions_are_the_same_all_run_long_and_change_nothing_else(
    train: Callable[..., Settings], mode: str
) -> None:
    watch = ["trainer.watch_questions.freq=2", "trainer.watch_questions.count=3", f"trainer.validation_mode={mode}"]
    train(*watch, "trainer.total_training_steps=3")
    settings = train(*watch, "trainer.total_training_steps=4", "trainer.logger=[tensorboard]")
    read_metrics(settings)
    folder = settings.run.folder
    labels = ["watch-0", "watch-2", "watch-3", "watch-4"]
    assert sorted(file.stem for file in (folder / "validation").glob("watch-*.json")) == labels
    asked = [[row["uid"] for row in read_lines(folder / "validation" / f"{label}.jsonl")] for label in labels]
    assert asked == [asked[0]] * 4
    assert len(asked[0]) == 3
    assert all(uid.startswith("world_facts/train/") and uid.endswith("/0") for uid in asked[0])
    for label in labels:
        result = json.loads((folder / "validation" / f"{label}.json").read_text())
        assert (result["version"], result["count"], result["failed"]) == (int(label[6:]), 3, 0)
    row = read_lines(folder / "validation" / "watch-2.jsonl")[0]
    assert (row["status"], row["sample"], row["reason"], row["data_source"]) == ("OK", 0, None, "world_facts")
    assert row["policy_version_min"] >= 2
    assert set(row["timings"]) == {"queued_s", "generate_s", "retrieve_s", "score_s", "total_s"}
    assert [part["name"] for part in row["components"]] == ["format"]
    assert (folder / "checkpoints" / "best").read_text() == "step_4\n", "not by watch-3, whose EM is 1"
    streams = StreamClient(settings.redis, settings.run.id)
    assert [streams.count_backlog(name) for name in (streams.prompts, streams.trajectories)] == [0, 0]
    assert not list(Redis.from_url(settings.redis.url).scan_iter("*watch*")), "nothing of them is left"
    events = [(event.kind, event.step) for event in read_events(folder)]
    assert events[0] == ("start", 0)
    assert [step for kind, step in events if kind == "watch"] == [0, 2, 3, 4]
    assert [step for kind, step in events if kind == "validation"] == [0, 3, 4]
    assert ("resume", 3) in events
    assert ("checkpoint", 2) in events, "what was watched can be sampled again"


def test_a_finished_run_that_validates_can_be_extended(train: Callable[..., Settings]) -> None:
    train("trainer.test_freq=2", "trainer.total_training_steps=2")
    settings = train("trainer.test_freq=2", "trainer.total_training_steps=4", "trainer.batch_timeout_s=20")
    read_metrics(settings)
    files = sorted((settings.run.folder / "validation").glob("*.json"))
    versions = {file.stem: json.loads(file.read_text())["version"] for file in files}
    assert versions == {"after": 4, "before": 0, "step-2": 2}


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
        train("trainer.total_training_steps=2", f"trainer.guards.non_finite.action={action}")
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
    limits = ["redis.max_stream_bytes=3", "trainer.max_staleness=0", "trainer.batch_timeout_s=5"]
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
    monkeypatch.setattr("forage_trainer.waiting._DISK_INTERVAL_S", 0.05)
    settings = train("trainer.save_freq=1", "trainer.val_before_train=false", "trainer.test_freq=0")
    assert list(StreamClient(settings.redis, settings.run.id).read_ledger()) == [1, 2, 3]
    assert len(folders) == 4
    assert {path.name for path in (settings.run.folder / "checkpoints").glob("step_*")} == {"step_2", "step_3"}


def test_groups_of_another_environment_are_not_trained_on(
    train: Callable[..., Settings], redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_trainer.data.routes._PATIENCE_S", 0.1)
    StreamClient(redis_server, "other").declare_environments({"world_facts": "single_turn"})
    with pytest.raises(UserError, match="'world_facts' gets the environment 'single_turn' from the rollout service"):
        train("run.id=other", "trainer.val_before_train=false")
    assert StreamClient(redis_server, "other").read_ledger() == {}


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_policy_is_published_beside_the_next_step(
    train: Callable[..., Settings], redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """That of step 1 is not complete before step 2 has begun; prompts that it allows wait for it."""
    begun, issued_before = threading.Event(), []
    real_complete, real_step = PolicyStore.complete, PolicyStep.__call__

    def complete(self: PolicyStore, name: str, check: Callable[[], object]) -> None:
        if name.startswith("v1-"):
            assert begun.wait(60)
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


def test_without_staleness_every_step_waits_for_its_policy(
    train: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher.Publisher, "begin", lambda *_: pytest.fail("beside a step"))
    read_metrics(train("trainer.max_staleness=0", "trainer.save_freq=9"))


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
