"""The trainer as a process: after any end, the next start resumes and the result is the same, to the bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

pytest.importorskip("verl", reason="needs the trainer's environment")
from trainer_parts import read_lines
from trainer_process import BATCH, TrainerProcess

from forage_trainer.checkpoints.manifest import read_checkpoint

HALF = 4


def test_an_extended_killed_and_stopped_run_consumes_the_same_groups_as_an_uninterrupted_one(
    trainer: Callable[..., TrainerProcess],
) -> None:
    straight = trainer("straight", 2 * HALF)
    straight.complete()
    trainer("broken", HALF, stale=frozenset({f"{HALF + 1}/1"})).complete()
    broken = trainer("broken", 2 * HALF)
    killed = broken.run_until(HALF + 1)  # the checkpoint is of step HALF: later steps are taken again
    killed.kill()
    killed.wait()
    stopped = broken.run_until(2 * HALF - 1)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 143, broken.log[-3000:]
    broken.complete()

    assert list(straight.consumed) == list(range(1, 2 * HALF + 1))
    assert broken.consumed == straight.consumed
    consumed = [uid for uids in broken.consumed.values() for uid in uids]
    assert len(consumed) == len(set(consumed)) == 2 * HALF * BATCH
    assert broken.streams.count_backlog(broken.streams.trajectories) == 0
    assert broken.streams.count_backlog(broken.streams.prompts) == 0
    again = [issue for issue in broken.streams.read_issued() if issue.attempt]
    assert [(i.batch, i.position, i.attempt) for i in again] == [(HALF + 1, 1, 1)], (
        "the group that came with version 0 was dropped and issued again"
    )
    assert [row["step"] for row in broken.metrics] == list(range(1, 2 * HALF + 1))
    for label, version in (("before", 0), ("after", 2 * HALF)):
        result = json.loads((broken.folder / "validation" / f"{label}.json").read_text())
        assert (result["version"], result["count"], result["failed"]) == (version, 5, 0)
        assert len(read_lines(broken.folder / "validation" / f"{label}.jsonl")) == 5
    assert json.loads((broken.folder / "state.json").read_text())["phase"] == "done"


COMPARED = (
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "kl_ref",
    "mismatch_kl",
    "reward_mean",
    "advantage_abs_mean",
    "tokens",
    "tokens_digest",
    "weights_digest",
)


def test_a_run_killed_at_five_points_is_bit_equal_to_an_uninterrupted_one(
    trainer: Callable[..., TrainerProcess],
) -> None:
    settings = ("trainer.save_freq=2", "trainer.actor.optim.lr_warmup_steps=3", "trainer.max_ckpt_to_keep=1")
    straight, broken = (trainer(run_id, 6, *settings) for run_id in ("straight", "broken"))
    straight.complete()

    broken.die_at("before_checkpoint", 2)
    assert (broken.checkpoint, broken.consumed) == (0, {})
    broken.die_at("during_checkpoint", 2)
    assert (broken.checkpoint, broken.consumed) == (0, {})
    assert list((broken.folder / "checkpoints").glob(".partial-*-step_2/state"))
    broken.die_at("after_checkpoint", 2)
    assert (broken.checkpoint, broken.consumed) == (2, {})
    broken.die_at("publish", 3)
    assert (broken.checkpoint, list(broken.consumed)) == (2, [1, 2])
    assert list((broken.folder / "policies").glob(".partial-*-v3-*"))
    policy = broken.streams.read_policy()
    assert policy is not None
    assert policy.version == 2
    broken.die_at("before_issue", 4)
    # The checkpoint of step 4 becomes durable beside the next step, and its groups are acknowledged after that.
    assert (broken.checkpoint, len(broken.consumed)) in {(2, 2), (4, 2), (4, 4)}
    broken.complete()

    assert broken.consumed == straight.consumed
    assert list(broken.consumed) == list(range(1, 7))
    metrics = [[{name: row.get(name) for name in COMPARED} for row in run.metrics] for run in (straight, broken)]
    assert metrics[0] == metrics[1]
    assert len({row["loss"] for row in metrics[0]}) == 6
    assert all(isinstance(row["grad_norm"], float) for row in metrics[0])
    assert broken.published == straight.published
    assert list(broken.published) == list(range(7))
    # A warm-up begins at a rate of 0: the first step changes nothing, each other one does.
    assert broken.published[0] == broken.published[1]
    assert len(set().union(*broken.published.values())) == 6
    last = [run.folder / "checkpoints/step_6" for run in (straight, broken)]
    assert read_checkpoint(last[0]).files == read_checkpoint(last[1]).files, "weights, moments, schedule, random state"
    parts = [read_checkpoint(folder).parts for folder in last]
    for one in parts:  # only tokens of the policy that is trained are compared, and which one samples is a race
        del one["guards"]["trends"]["logprob_diff_mean"]
    assert parts[0] == parts[1]
    assert broken.streams.count_backlog(broken.streams.trajectories) == 0
    assert broken.streams.count_backlog(broken.streams.prompts) == 0


def test_a_guard_rolls_back_then_stops_the_run_and_every_group_is_consumed_once(
    trainer: Callable[..., TrainerProcess],
) -> None:
    # After the first step any KL is too much.
    strict = ("trainer.save_freq=1", "trainer.guards.thresholds.kl=1e-12", "trainer.guards.max_rollbacks=1")
    strict += ("trainer.guards.actions.logprob=ignore",)  # the scripted log-probabilities are of no policy
    run = trainer("guarded", 4, *strict, "trainer.guards.actions.kl=rollback")
    assert run.start().wait(200) == 3, run.log[-3000:]
    assert (run.checkpoint, list(run.consumed)) == (1, [1])
    assert "guard 'kl' at step 2: KL to the reference is" in run.log
    assert run.metrics[-1]["guards"] == ["kl"]
    policy = run.streams.read_policy()
    assert policy is not None
    assert policy.version == 1, "what the guard refused was not published"

    assert run.start().wait(200) == 2, run.log[-3000:]
    assert run.log.splitlines()[-1].startswith(
        "forage trainer: guard 'kl' stopped the run at step 3: KL to the reference"
    )
    assert (run.checkpoint, list(run.consumed)) == (2, [1, 2])

    trainer("guarded", 4, *strict, "trainer.guards.actions.kl=warn").complete()
    assert [row["guards"] for row in run.metrics] == [[], ["skipped"], ["kl"], ["kl"]]
    assert [row["step"] for row in run.metrics if "loss" in row] == [1, 3, 4]
    assert run.published[2] == run.published[1], "the skipped step changed nothing"
    consumed = [uid for uids in run.consumed.values() for uid in uids]
    assert list(run.consumed) == [1, 2, 3, 4]
    assert len(consumed) == len(set(consumed)) == 4 * BATCH
    assert run.streams.count_backlog(run.streams.trajectories) == 0
