"""What a step does with trajectories that were cut (DAPO's overlong filtering), by the real worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from arrived_groups import arrive
from overlong_parts import build
from spmd_process import OPTIONS
from trainer_parts import write_model

from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_runtime.settings import load_settings
from forage_trainer.data.overlong import mask_cut
from forage_trainer.data.tensors import build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker


def test_a_cut_trajectory_is_in_the_baseline_and_in_no_loss(tmp_path: Path) -> None:
    """The update equals one of the other rows alone with the same advantages, whatever the aggregation."""
    model = write_model(tmp_path / "model")
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        more = [f"trainer.actor.loss_agg_mode={aggregation}", "trainer.actor.use_kl_loss=false", "trainer.threads=1"]
        more += ["trainer.actor.optim.lr=1e-3", "trainer.actor.entropy_coeff=0.1", *OPTIONS[-4:-3]]
        settings = load_settings(None, [f"model.path={model}", "trainer.algorithm.adv_estimator=gae", *more], {})
        algorithm = settings.trainer.algorithm
        tensors, group = build(algorithm, unfinished=(1, 4))
        advantages = torch.linspace(-1, 1, tensors.mask.numel()).view_as(tensors.mask) * tensors.mask
        masked, count = mask_cut(tensors, group.trajectories)
        assert masked is not None
        assert count == 2
        assert masked.mask.sum(-1).bool().tolist() == [True, False, True, True, False, True]
        assert torch.equal(masked.state, tensors.state)
        kept = [0, 2, 3, 5]
        others = TrajectoryGroup(group_uid="a", trajectories=[group.trajectories[row] for row in kept])
        alone = build_step_tensors(select_trajectories([arrive(others)], algorithm), 0, 1, 0, algorithm)
        assert alone is not None
        worker, reference = PolicyWorker(settings), PolicyWorker(settings)
        width = alone.mask.shape[1]
        result = worker.update(masked, advantages, None, None, 1)
        expected = reference.update(alone, advantages[kept][:, :width], None, None, 1)
        assert result.loss == pytest.approx(expected.loss, rel=1e-4)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert result.log_probs[1].any(), "its log-probabilities are still compared with the engine's"
        critic = worker.update_critic(masked, advantages, advantages + 1, 1)
        alone_critic = reference.update_critic(alone, advantages[kept][:, :width], advantages[kept][:, :width] + 1, 1)
        assert critic["critic/vf_loss"] == pytest.approx(alone_critic["critic/vf_loss"], rel=1e-4)
