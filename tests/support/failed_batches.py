"""Batches full of failed trajectories, and the training of what is left of them.

Everything from the groups to the optimizer is real: selection, tensors, rewards, estimators, losses, verl's engine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from arrived_groups import arrive
from torch.distributed.tensor import DTensor
from trainer_parts import VOCABULARY, build_trajectory, write_model

from forage_proto.v1.trajectory_pb2 import Component, Policy, Score, Status, Trajectory, TrajectoryGroup, Turn
from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch
from forage_runtime.settings import Settings, load_settings
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.step import PolicyStep, Stopwatch

GROUPS, SAMPLES = 16, 9
FAILED_SHARE = 0.916
LONGEST = 160
STEPS = 2
FAILURES = [Status.STATUS_TIMEOUT, Status.STATUS_INTERNAL, Status.STATUS_INVALID_INPUT, Status.STATUS_UNSPECIFIED]
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
IN_REWARD = ("algorithm.use_kl_in_reward=true", "actor.use_kl_loss=false", "algorithm.kl_ctrl.type=adaptive")
GAE, RLOO, PLUS_PLUS, MULTITURN = (
    f"algorithm.adv_estimator={name}" for name in ("gae", "rloo", "reinforce_plus_plus", "grpo_multiturn")
)
SPLIT = ("actor.ppo_mini_batch_size=4", "actor.ppo_epochs=2")
RECIPES: dict[str, tuple[str, ...]] = {
    **{f"grpo-{mode}": (f"actor.loss_agg_mode={mode}", "actor.loss_scale_factor=50") for mode in AGGREGATIONS},
    "grpo-without-std": ("algorithm.norm_adv_by_std_in_grpo=false", *SPLIT),
    "grpo-filtered": ("algorithm.filter_groups=true", "algorithm.rollout_correction.mode=icepop"),
    "grpo-kl-in-reward": (*IN_REWARD, *SPLIT, "algorithm.rollout_correction.mode=none"),
    "grpo-lora": ("lora.lora_rank=4", *SPLIT),
    "grpo-observations": ("algorithm.state_masking=false", "actor.entropy_coeff=0.01"),
    **{f"multiturn-{mode}": (MULTITURN, f"actor.loss_agg_mode={mode}") for mode in AGGREGATIONS[:3]},
    "multiturn-proportional": (MULTITURN, "algorithm.reward_placement=turn_proportional", *SPLIT),
    **{f"rloo-{mode}": (RLOO, f"actor.loss_agg_mode={mode}") for mode in AGGREGATIONS[:3]},
    "reinforce++": (PLUS_PLUS, *IN_REWARD),
    "reinforce++-split": (PLUS_PLUS, "algorithm.gamma=0.9", "algorithm.rollout_correction.mode=decoupled", *SPLIT),
    **{f"gae-{mode}": (GAE, f"actor.loss_agg_mode={mode}") for mode in AGGREGATIONS[:3]},
    "gae-split": (GAE, "algorithm.lam=0.9", *IN_REWARD, *SPLIT),
}


def draw_trajectory(chance: random.Random, uid: str, sample: int, version: int) -> Trajectory:
    """A sound trajectory of one to three turns, scored as a whole and by its turns."""
    turns = [chance.randint(2, 9) for _ in range(chance.randint(1, 3))]
    reward = chance.choice([0.0, 0.25, 0.5, 1.0])
    row = build_trajectory(uid, sample, reward, version, turns=turns, observation=chance.randint(1, 9))
    number = 0
    for place, own in enumerate(row.loss_mask):
        number += own and not (place and row.loss_mask[place - 1])
        row.turn_ids[place] = number if own else -1
    row.logprobs[:] = [chance.gauss(-5.7, 0.3) if own else 0.0 for own in row.loss_mask]
    row.turns.extend(Turn(index=turn) for turn in range(1, number + 1))
    parts = [Component(name=f"turn_{n}", raw=0.5, weighted=chance.random() / number) for n in range(1, number + 1)]
    whole = Component(name="answer", raw=reward, weighted=reward)
    del row.score.components[:]
    row.score.components.extend([*parts, whole])
    row.score.total = reward + sum(part.weighted for part in parts)
    return row


def fail(chance: random.Random, row: Trajectory) -> None:
    """Make a trajectory one that has failed, as a random part of the stack leaves it, after a random part of it."""

    def stop(row: Trajectory) -> None:  # the engine, a search or the time limit, in the middle
        kept = chance.randint(0, len(row.loss_mask))
        for name in ("loss_mask", "turn_ids", "logprobs"):
            getattr(row, name)[:] = getattr(row, name)[:kept]
        row.token_ids[:] = row.token_ids[: row.prompt_length + kept]
        row.status = chance.choice(FAILURES)
        if chance.random() < 0.5:
            row.ClearField("score")

    def refuse_prompt(row: Trajectory) -> None:
        identity = row.id, row.group_uid, row.sample
        row.Clear()
        row.id, row.group_uid, row.sample = identity
        row.status = Status.STATUS_INVALID_INPUT

    def fail_reward(row: Trajectory) -> None:
        row.score.CopyFrom(Score(status=chance.choice([*FAILURES, Status.STATUS_ABSTAIN]), total=chance.gauss(0, 1e6)))
        if chance.random() < 0.5:
            row.status = chance.choice(FAILURES)

    def spoil_score(row: Trajectory) -> None:
        bad = chance.choice([float("nan"), float("inf"), -float("inf")])
        if chance.random() < 0.5:
            row.score.total = bad
        else:
            chance.choice(row.score.components).weighted = bad

    def tear_fields(row: Trajectory) -> None:  # one value for each token no more
        field = getattr(row, chance.choice(["loss_mask", "turn_ids", "logprobs"]))
        field.pop(chance.randrange(len(field)))

    def sample_nothing(row: Trajectory) -> None:
        row.loss_mask[:] = [0] * len(row.loss_mask)

    def cut_context(row: Trajectory) -> None:
        row.turns[-1].context_begin = chance.randint(1, 9)

    def grow(row: Trajectory) -> None:  # longer than a micro-batch
        more = LONGEST + chance.randint(1, 50) - len(row.token_ids)
        row.token_ids.extend(chance.randrange(3, VOCABULARY) for _ in range(more))
        row.loss_mask.extend([1] * more)
        row.turn_ids.extend([1] * more)
        row.logprobs.extend([-1e3] * more)

    ways = [stop, stop, stop, refuse_prompt, fail_reward, spoil_score, tear_fields, sample_nothing, cut_context, grow]
    chance.choice(ways)(row)
    if row.status not in (Status.STATUS_OK, Status.STATUS_INVALID_INPUT):
        row.score.total = chance.choice([row.score.total, 1e30, -1e30])


def draw_batch(seed: int, version: int) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """(a batch in which 91.6 % of all trajectories have failed, the survivors alone in the groups that have any).

    Survivors are drawn a few groups at a time, so that some groups are compared and others have a single one.
    """
    chance = random.Random(seed)
    places = [(position, sample) for position in range(GROUPS) for sample in range(SAMPLES)]
    count = len(places) - round(FAILED_SHARE * len(places))
    crowded = chance.sample(range(GROUPS), 4)
    surviving = set(chance.sample([place for place in places if place[0] in crowded], count - 3))
    surviving |= set(chance.sample([place for place in places if place not in surviving], 3))
    whole, alone = [], []
    for position in range(GROUPS):
        uid = f"facts/train/{position}/{version}"
        rows = [draw_trajectory(chance, uid, sample, version) for sample in range(SAMPLES)]
        sound = [Trajectory.FromString(row.SerializeToString()) for row in rows if (position, row.sample) in surviving]
        for row in rows:
            if (position, row.sample) not in surviving:
                fail(chance, row)
        whole.append(TrajectoryGroup(group_uid=uid, batch=version + 1, position=position, trajectories=rows))
        if sound:
            alone.append(TrajectoryGroup(group_uid=uid, batch=version + 1, position=position, trajectories=sound))
    return whole, alone


def digest(value: Any) -> str:
    """SHA-256 over every bit of nested tensors."""
    result = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for name in sorted(part, key=str):
                result.update(str(name).encode())
                add(part[name])
        elif isinstance(part, list | tuple):
            for one in part:
                add(one)
        elif isinstance(part, torch.Tensor):
            tensor = part.to_local() if isinstance(part, DTensor) else part
            result.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            result.update(repr(part).encode())

    add(value)
    return result.hexdigest()


class Bench:
    """One worker and its initial state; `train` takes steps from there."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.worker = PolicyWorker(settings)
        self.start = folder / "start"
        self.worker.save(self.start)

    def train(self, batches: Sequence[list[TrajectoryGroup]]) -> tuple[str, list[str], list[dict[str, Any]]]:
        """(digest of weights and optimizers, gradients of every update, metrics of every step)."""
        self.worker.load(self.start)
        has_critic = self.worker._critic is not None
        step = PolicyStep(self.settings, self.worker, 0, self.worker if has_critic else None)
        engines: list[Any] = [self.worker._actor.engine]
        engines += [self.worker._critic.worker.engine] if self.worker._critic is not None else []
        gradients: list[str] = []
        hooks = [
            engine.optimizer.register_step_pre_hook(
                lambda *_, module=engine.module: gradients.append(
                    digest({name: parameter.grad for name, parameter in module.named_parameters()})
                )
            )
            for engine in engines
        ]
        metrics = []
        for version, groups in enumerate(batches):
            batch = Batch(version + 1, tuple(Entry(b"1-0", arrive(group)) for group in groups), 0)
            metrics.append(step(batch, Policy(version=version, epoch=1), Stopwatch(), lambda: None))
        for hook in hooks:
            hook.remove()
        state = [(engine.module.state_dict(), engine.optimizer.state_dict()) for engine in engines]
        return digest([state, step.kl.state_dict()]), gradients, metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def build(model: Path, tmp_path: Path) -> Callable[..., Bench]:
    def make(*overrides: str) -> Bench:
        limit = f"trainer.actor.ppo_max_token_len_per_gpu={LONGEST}"
        rates = ["trainer.actor.optim.lr=1e-3", "trainer.critic.optim.lr=1e-3", "trainer.threads=1"]
        chosen = [f"trainer.{override}" for override in overrides]
        return Bench(load_settings(None, [f"model.path={model}", limit, *rates, *chosen], {}), tmp_path)

    return make


def assert_trains_as_survivors(bench: Bench, recipe: str, seed: int) -> None:
    """That a run of batches full of failures ends, to the bit, as one of their survivors alone."""
    pairs = [draw_batch(1000 * seed + version, version) for version in range(STEPS)]
    rows = [row for whole, _ in pairs for group in whole for row in group.trajectories]
    survivors = sum(len(group.trajectories) for _, alone in pairs for group in alone)
    assert 1 - survivors / len(rows) == pytest.approx(FAILED_SHARE, abs=0.003)
    state, gradients, metrics = bench.train([whole for whole, _ in pairs])
    assert len(gradients) >= STEPS * (2 if recipe.startswith("gae") else 1)
    assert len(set(gradients)) == len(gradients), "every update had a gradient of its own"
    expected_state, expected_gradients, expected_metrics = bench.train([alone for _, alone in pairs])
    assert gradients == expected_gradients
    assert state == expected_state
    for name in ("loss", "grad_norm", "entropy", "clip_fraction"):
        assert [one[name] for one in metrics] == [one[name] for one in expected_metrics]
