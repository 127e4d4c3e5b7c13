"""The order and the metrics of one step, with a worker that returns given values and records its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arrived_groups import arrive
from trainer_parts import build_trajectory, make_group

from forage_proto.v1.trajectory_pb2 import Policy, Status, TrajectoryGroup, Turn
from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch
from forage_runtime.settings import Settings, load_settings
from forage_trainer.data.tensors import StepTensors, leave_out_unusable
from forage_trainer.engine.policy_worker import UpdateResult
from forage_trainer.reporting.guards import Guards
from forage_trainer.reporting.trajectories import StepRecord
from forage_trainer.step import PolicyStep, Stopwatch

KL = ["trainer.algorithm.use_kl_in_reward=true", "trainer.actor.use_kl_loss=false"]


class Worker:
    """Log-probabilities of -5.5 (policy) and -6 (reference), values of 0.25; keeps what updates are given."""

    def __init__(self, updates: int = 1, reference: bool = True) -> None:
        self.asked: list[str] = []
        self.given: dict[str, Any] = {}
        self._updates = updates
        self._reference = reference

    def updates_per_step(self, groups: int) -> int:
        return self._updates

    def log_probs(self, batch: StepTensors) -> torch.Tensor:
        return self._said("log_probs", batch, -5.5)

    def log_probs_and_entropies(self, batch: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        return self._said("log_probs_and_entropies", batch, -5.5), torch.full_like(batch.mask, 2.0)

    def reference_log_probs(self, batch: StepTensors) -> torch.Tensor | None:
        return self._said("reference", batch, -6.0) if self._reference else None

    def values(self, batch: StepTensors) -> torch.Tensor:
        return self._said("values", batch, 0.25)

    def update_critic(
        self, batch: StepTensors, values: torch.Tensor, returns: torch.Tensor, last_position: int
    ) -> dict[str, float]:
        self.asked.append("update_critic")
        self.given |= {"values": values, "returns": returns}
        return {"critic/vf_loss": 0.5}

    def update(
        self,
        batch: StepTensors,
        advantages: torch.Tensor,
        reference: torch.Tensor | None,
        old: torch.Tensor | None,
        last_position: int,
    ) -> UpdateResult:
        self.asked.append("update")
        self.given["batch"] = batch
        self.given |= {"batch": batch, "advantages": advantages, "reference": reference, "old": old}
        own = torch.full_like(batch.mask, -5.5)
        return UpdateResult(own, 1.5, 2.5, 1e-6, 0.1, 0.3, {"actor/pg_loss": 0.2}, torch.full_like(own, 3.0))

    def _said(self, what: str, batch: StepTensors, value: float) -> torch.Tensor:
        self.asked.append(what)
        return torch.full_like(batch.mask, value)


def build_settings(*overrides: str) -> Settings:
    return load_settings(None, list(overrides), {})


def take(
    worker: Worker, settings: Settings, *groups: TrajectoryGroup, version: int = 0
) -> tuple[dict[str, Any], PolicyStep]:
    step = PolicyStep(settings, worker, 0, worker if settings.trainer.algorithm.adv_estimator == "gae" else None)  # type: ignore[arg-type]
    batch = Batch(1, tuple(Entry(b"1-0", arrive(g)) for g in groups), 0)
    return step(batch, Policy(version=version, epoch=1), Stopwatch(), lambda: None), step


def test_a_single_update_needs_no_pass_for_old_log_probabilities() -> None:
    worker = Worker()
    take(worker, build_settings(), make_group("a", [0.0, 1.0]))
    assert worker.asked == ["reference", "update"]
    assert worker.given["old"] is None
    several = Worker(updates=2)
    take(several, build_settings(), make_group("a", [0.0, 1.0]))
    assert several.asked == ["log_probs", "reference", "update"]
    assert several.given["old"].eq(-5.5).all()


def test_failed_rows_change_neither_advantages_nor_metrics_of_the_update() -> None:
    valid, mixed = make_group("a", [0.0, 1.0, 1.0]), make_group("a", [0.0, 1.0, 1.0])
    mixed.trajectories.insert(1, build_trajectory("a", 9, 5.0, status=Status.STATUS_TIMEOUT))
    mixed.trajectories.append(build_trajectory("a", 8, 0.0, score_status=Status.STATUS_INTERNAL))
    lonely = TrajectoryGroup(group_uid="b", trajectories=[build_trajectory("b", 0, 1.0)])
    one, other = Worker(), Worker()
    expected, _ = take(one, build_settings(), valid)
    result, _ = take(other, build_settings(), mixed, lonely)
    assert torch.equal(one.given["advantages"], other.given["advantages"])
    assert result["dead_groups"] == 1
    for name in ("critic/advantages/mean", "critic/rewards/mean", "kl_ref", "is_mean", "advantage_abs_mean"):
        assert result[name] == expected[name]


def test_a_trajectory_whose_context_was_cut_is_left_out() -> None:
    rewards = [0.0, 1.0, 0.5]
    plain, cut = make_group("a", rewards[:2]), make_group("a", rewards)
    cut.trajectories[2].turns.extend([Turn(index=1), Turn(index=2, context_begin=7)])
    one, other = Worker(), Worker()
    take(one, build_settings(), plain)
    metrics, _ = take(other, build_settings(), cut)
    assert torch.equal(one.given["advantages"], other.given["advantages"])
    assert (metrics["cut_trajectories"], metrics["too_long_trajectories"]) == (1, 0)
    assert metrics["reward_mean"] == 0.5  # the policy's behaviour is that of all three
    ((left,), _) = leave_out_unusable([arrive(cut)], build_settings().trainer)
    assert left.trajectories[2].status == Status.STATUS_INVALID_INPUT
    assert "turn 2 was sampled without the first 7 tokens" in left.trajectories[2].status_detail


def test_a_trajectory_longer_than_a_micro_batch_is_left_out_with_a_status() -> None:
    whole = make_group("a", [0.0, 1.0])
    whole.trajectories.append(build_trajectory("a", 2, 1.0, turns=(60, 5)))
    limit = len(whole.trajectories[2].token_ids) - 1
    worker = Worker()
    chosen = build_settings("trainer.algorithm.adv_estimator=gae", f"trainer.actor.ppo_max_token_len_per_gpu={limit}")
    metrics, _ = take(worker, chosen, whole)
    assert len(worker.given["advantages"]) == 2
    assert (metrics["too_long_trajectories"], metrics["cut_trajectories"]) == (1, 0)
    ((left,), _) = leave_out_unusable([arrive(whole)], chosen.trainer)
    assert left.trajectories[2].status == Status.STATUS_INVALID_INPUT
    detail = f"too long: it has {limit + 1} tokens, and trainer.actor.ppo_max_token_len_per_gpu is {limit}"
    assert left.trajectories[2].status_detail == f"left out of the step, {detail}"


def test_an_overlong_penalty_changes_advantages_and_no_reported_reward() -> None:
    plain, penalized = Worker(), Worker()
    expected, _ = take(plain, build_settings(), make_group("a", [0.0, 1.0, 0.5]))
    long = make_group("a", [0.0, 1.0])
    long.trajectories.append(build_trajectory("a", 2, 0.5, turns=(30, 30)))
    more = [f"trainer.algorithm.overlong.{one}" for one in ("buffer_len=20", "max_len=60", "penalty_factor=0.5")]
    result, _ = take(penalized, build_settings(*more), long)
    assert result["reward_mean"] == expected["reward_mean"] == 0.5
    assert result["critic/rewards/mean"] == pytest.approx(1 / 3)
    assert result["overlong_penalty_mean"] == pytest.approx(0.5 / 3)
    assert penalized.given["advantages"][2, 0] < 0
    assert "overlong_penalty_mean" not in expected
    assert long.trajectories[2].score.total == 0.5


def test_a_cut_trajectory_is_filtered_and_a_batch_of_them_takes_no_step() -> None:
    group, worker, chosen = (
        make_group("a", [0.0, 1.0, 0.5]),
        Worker(),
        build_settings("trainer.algorithm.overlong.filter=true"),
    )
    group.trajectories[1].finished = False
    metrics, _ = take(worker, chosen, group)
    assert metrics["overlong_filtered"] == 1
    assert worker.given["batch"].mask.any(1).tolist() == [True, False, True]
    assert worker.given["advantages"][1, 0] > 0, "it is in the baseline"
    for trajectory in group.trajectories:
        trajectory.finished = False
    nothing = Worker()
    metrics, _ = take(nothing, chosen, group)
    assert "update" not in nothing.asked
    assert metrics["overlong_filtered"] == 3


def test_a_batch_of_trajectories_that_are_too_long_takes_no_step() -> None:
    worker = Worker()
    metrics, _ = take(worker, build_settings("trainer.actor.ppo_max_token_len_per_gpu=20"), make_group("a", [0.0, 1.0]))
    assert worker.asked == []
    assert (metrics["too_long_trajectories"], metrics["dead_groups"]) == (2, 1)


def test_a_batch_without_two_valid_rows_takes_no_step() -> None:
    worker = Worker()
    metrics, _ = take(worker, build_settings(), make_group("a", [1.0]))
    assert worker.asked == []
    assert metrics["dead_groups"] == 1
    assert metrics["state_tokens/total"] == metrics["state_tokens"]


def test_groups_of_equal_rewards_are_left_out_and_counted() -> None:
    worker = Worker()
    groups = [make_group("a", [0.5, 0.5]), make_group("b", [0.0, 1.0], position=1)]
    metrics, _ = take(worker, build_settings("trainer.algorithm.filter_groups=true"), *groups)
    assert set(worker.given["batch"].positions) == {1}
    assert metrics["filtered_groups"] == 1
    nothing, _ = take(Worker(), build_settings("trainer.algorithm.filter_groups=true"), groups[0])
    assert "grad_norm" not in nothing
    assert nothing["filtered_groups"] == 1


def test_the_kl_in_the_reward_is_taken_from_every_state_token() -> None:
    worker = Worker()
    adaptive = [f"trainer.algorithm.kl_ctrl.{one}" for one in ("type=adaptive", "kl_coef=0.1", "target_kl=0.1")]
    short, long = build_trajectory("a", 0, 0.0, turns=(2, 2)), build_trajectory("a", 1, 0.0, turns=(6, 4))
    metrics, step = take(
        worker,
        build_settings(*KL, *adaptive, "trainer.algorithm.norm_adv_by_std_in_grpo=false"),
        TrajectoryGroup(group_uid="a", trajectories=[short, long]),
    )
    assert worker.asked == ["log_probs", "reference", "update"]
    # k = 0.5 a token, so the longer row has 6 tokens of 0.05 less; each is half of that from their mean.
    assert worker.given["advantages"][0, 0].item() == pytest.approx(0.15)
    assert worker.given["advantages"][1, 0].item() == pytest.approx(-0.15)
    assert (metrics["kl_reward"], metrics["kl_reward_coef"]) == pytest.approx((0.5, 0.1))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert step.kl.beta == pytest.approx(0.1 * (1 + 0.2 * 2 / 10000))


def test_gae_uses_the_critics_values_and_updates_it() -> None:
    worker = Worker()
    metrics, _ = take(worker, build_settings("trainer.algorithm.adv_estimator=gae"), make_group("a", [0.0, 1.0]))
    assert worker.asked == ["reference", "values", "update_critic", "update"]
    mask = worker.given["batch"].mask.bool()
    torch.testing.assert_close(worker.given["returns"][0][mask[0]], torch.zeros(int(mask[0].sum())))
    torch.testing.assert_close(worker.given["returns"][1][mask[1]], torch.ones(int(mask[1].sum())))
    assert metrics["critic/vf_loss"] == 0.5
    assert metrics["critic/values/mean"] == 0.25


def test_a_value_that_is_not_finite_updates_nothing_and_trips_the_guard(capsys: pytest.CaptureFixture[str]) -> None:
    class BrokenCritic(Worker):
        def values(self, batch: StepTensors) -> torch.Tensor:
            values = super().values(batch)
            values[1, 0] = torch.nan
            return values

    worker = BrokenCritic()
    chosen = build_settings("trainer.algorithm.adv_estimator=gae")
    metrics, _ = take(worker, chosen, make_group("a", [0.0, 1.0]))
    assert worker.asked == ["reference", "values"]
    assert [trip.guard for trip in Guards(chosen.trainer.guards).check(metrics, 1)] == ["non_finite"]
    assert "test/a/1" in capsys.readouterr().err


def test_the_actor_is_not_updated_during_the_critics_warmup() -> None:
    warming = build_settings("trainer.algorithm.adv_estimator=gae", "trainer.critic_warmup=2")
    for version, expected in ((1, False), (2, True)):
        worker = Worker()
        metrics, _ = take(worker, warming, make_group("a", [0.0, 1.0]), version=version)
        assert "update_critic" in worker.asked
        assert ("update" in worker.asked) == expected
        assert ("grad_norm" in metrics) == expected


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a critic"):
        PolicyStep(build_settings("trainer.algorithm.adv_estimator=gae"), Worker(), 0)  # type: ignore[arg-type]


def test_one_sample_per_prompt_is_enough_without_a_group_baseline() -> None:
    worker = Worker()
    configured = build_settings("trainer.algorithm.adv_estimator=gae", "rollout.n=1")
    batch = Batch(1, tuple(Entry(b"1-0", arrive(make_group(uid, [1.0]))) for uid in "ab"), 0)
    records: list[StepRecord] = []
    PolicyStep(configured, worker, 0, worker)(batch, Policy(epoch=1), Stopwatch(), lambda: None, records.append)  # type: ignore[arg-type]
    assert [t.group_uid for t in records[0].rows] == ["a", "b"]
    assert "update" in worker.asked


def test_an_abandoned_step_changes_no_weights() -> None:
    worker = Worker()
    step = PolicyStep(build_settings(*KL), worker, 0)  # type: ignore[arg-type]

    def stop() -> None:
        raise InterruptedError

    batch = Batch(1, (Entry(b"1-0", arrive(make_group("a", [0.0, 1.0]))),), 0)
    with pytest.raises(InterruptedError):
        step(batch, Policy(version=0, epoch=1), Stopwatch(), stop)
    assert worker.asked == ["log_probs"]


def test_the_record_of_a_step_has_its_rows_and_tensors() -> None:
    for version, warmup in ((0, 0), (0, 1)):
        worker, records = Worker(), list[StepRecord]()
        configured = build_settings("trainer.algorithm.adv_estimator=gae", f"trainer.critic_warmup={warmup}")
        step = PolicyStep(configured, worker, 0, worker)  # type: ignore[arg-type]
        groups = [make_group("a", [0.0, 1.0]), make_group("b", [1.0])]
        groups[1].trajectories[0].status = Status.STATUS_TIMEOUT
        batch = Batch(1, tuple(Entry(b"1-0", arrive(g)) for g in groups), 0)
        step(batch, Policy(version=version, epoch=1), Stopwatch(), lambda: None, records.append)
        assert [t.id for t in records[0].rows] == [t.id for t in groups[0].trajectories]
        assert records[0].tensors is not None
        assert torch.equal(records[0].tensors.token_rewards, records[0].token_rewards)
        assert torch.equal(worker.given["returns"], records[0].returns)
        assert (records[0].log_probs is None) == (warmup == 1)
        step(Batch(2, batch.entries[1:], 0), Policy(version=1, epoch=1), Stopwatch(), lambda: None, records.append)
        assert (records[1].rows, records[1].tensors, len(records[1].groups)) == ((), None, 1)


@pytest.mark.parametrize(
    ("updates", "overrides", "asked", "entropy"),
    [
        (1, [], ["reference", "update"], 3.0),
        (1, KL, ["log_probs", "reference", "update"], 3.0),
        (2, [], ["log_probs_and_entropies", "reference", "update"], 2.0),
    ],
)
def test_entropies_come_with_a_pass_that_is_taken_anyway(
    updates: int, overrides: list[str], asked: list[str], entropy: float
) -> None:
    batch = Batch(1, (Entry(b"1-0", arrive(make_group("a", [0.0, 1.0]))),), 0)
    for keep, expected in ((True, asked), (False, [name.partition("_and")[0] for name in asked])):
        worker, records = Worker(updates), list[StepRecord]()
        step = PolicyStep(build_settings(*overrides), worker, 0)  # type: ignore[arg-type]
        step(batch, Policy(epoch=1), Stopwatch(), lambda: None, records.append if keep else None)
        assert worker.asked == expected, "a step whose record nobody keeps computes none"
        assert all(record.entropies is not None and record.entropies.eq(entropy).all() for record in records)


def test_metrics_have_verls_names_beside_ours() -> None:
    metrics, _ = take(Worker(), build_settings(), make_group("a", [0.0, 1.0]))
    same = {
        "critic/score/mean": "reward_mean",
        "actor/entropy": "entropy",
        "actor/grad_norm": "grad_norm",
        "state_tokens/coverage": "coverage",
        "rollout_corr/rollout_is_mean": "is_mean",
    }
    assert {name: metrics[name] for name in same} == {name: metrics[ours] for name, ours in same.items()}
    assert metrics["actor/pg_loss"] == 0.2
    assert metrics["critic/score/max"] == 1.0
