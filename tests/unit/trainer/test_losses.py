"""The losses of actor and critic, as they are configured here, against their formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_parts import (
    SCALE,
    Matrices,
    aggregate,
    build_batch,
    describe_batch,
    draw_matrices,
    lay_out_prediction,
    run_actor_loss,
)
from verl.workers.utils.losses import value_loss

from forage_runtime.errors import SettingsError
from forage_runtime.settings import ActorSettings, CorrectionSettings, TrainerSettings, load_settings
from forage_trainer.algorithms.off_policy import compute_correction_metrics, importance_weights
from forage_trainer.data.tensors import StepTensors
from forage_trainer.engine.critic_worker import build_critic_config

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def compute_weights(given_: Matrices, state: np.ndarray, mode: str) -> np.ndarray:
    ratio = np.exp(given_["old"].astype(float) - given_["engine"])
    result = {
        "none": np.ones_like(ratio),
        "tis": np.minimum(ratio, 2.0),
        "decoupled": ratio,
        "icepop": np.where((ratio < 0.5) | (ratio > 5.0), 0.0, ratio),
    }[mode]
    return np.where(state == 1, result, 1.0)


def compute_actor_loss(tensors: StepTensors, given_: Matrices, actor: ActorSettings, mode: str) -> float:
    ratio = np.exp(given_["own"].astype(float) - given_["old"])
    advantage = given_["advantages"]
    clipped = np.clip(ratio, 1 - actor.clip_ratio, 1 + actor.clip_ratio_high)
    gain = np.minimum(ratio * advantage, clipped * advantage)
    gain = np.where(advantage < 0, np.maximum(gain, actor.clip_ratio_c * advantage), gain)
    log_ratio = given_["reference"].astype(float) - given_["own"]
    k3 = np.clip(np.exp(log_ratio) - log_ratio - 1, -10, 10)
    mask, how = tensors.mask.numpy(), actor.loss_agg_mode
    return (
        aggregate(-gain * compute_weights(given_, tensors.state.numpy(), mode), mask, how)
        - actor.entropy_coeff * aggregate(given_["entropy"], mask, how)
        + (actor.kl_loss_coef * aggregate(k3, mask, how) if actor.use_kl_loss else 0.0)
    )


def build_settings(mode: str, **others: Any) -> ActorSettings:
    scale = SCALE if mode == "seq-mean-token-sum-norm" else None
    fields = {"clip_ratio": 0.2, "clip_ratio_high": 0.4, "clip_ratio_c": 1.5, "entropy_coeff": 0.01}
    return ActorSettings(loss_agg_mode=mode, loss_scale_factor=scale, kl_loss_coef=0.3, **(fields | others))


@pytest.mark.parametrize("agg", MODES)
@pytest.mark.parametrize("correction", ["none", "tis", "decoupled", "icepop"])
@pytest.mark.parametrize("state_masking", [True, False])
def test_the_actor_loss_is_its_formula(agg: str, correction: str, state_masking: bool) -> None:
    tensors, actor = build_batch(state_masking), build_settings(agg)
    given_ = draw_matrices(tensors)
    result = run_actor_loss(tensors, given_, actor, CorrectionSettings(mode=correction))
    assert float(result) == pytest.approx(compute_actor_loss(tensors, given_, actor, correction), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("others", [{"use_kl_loss": False}, {"entropy_coeff": 0.0}, {"clip_ratio_c": 100.0}])
def test_each_term_of_the_loss_can_be_left_out(others: dict[str, Any]) -> None:
    tensors = build_batch()
    given_, actor = draw_matrices(tensors), build_settings("token-mean", **others)
    result = float(run_actor_loss(tensors, given_, actor, CorrectionSettings()))
    assert result == pytest.approx(compute_actor_loss(tensors, given_, actor, "tis"), rel=1e-4)
    assert result != pytest.approx(compute_actor_loss(tensors, given_, build_settings("token-mean"), "tis"), rel=1e-4)


@pytest.mark.parametrize("agg", MODES)
def test_micro_batches_add_up_to_the_mini_batch(agg: str) -> None:
    tensors, actor = build_batch(), build_settings(agg)
    given_ = draw_matrices(tensors)
    parts = [run_actor_loss(tensors, given_, actor, CorrectionSettings(), rows) for rows in ([2, 0], [3], [1])]
    assert float(sum(parts)) == pytest.approx(
        float(run_actor_loss(tensors, given_, actor, CorrectionSettings())), rel=1e-5
    )


@pytest.mark.parametrize("agg", MODES)
@pytest.mark.parametrize("correction", ["none", "tis", "decoupled", "icepop"])
def test_values_on_observation_tokens_do_not_change_the_gradient(agg: str, correction: str) -> None:
    tensors, actor = build_batch(), build_settings(agg)
    given_ = draw_matrices(tensors)
    other = {name: np.where(tensors.mask == 1, value, 7.0) for name, value in given_.items() if name != "own"}
    gradients = []
    for some in (given_, other | {"own": given_["own"]}):
        own = torch.tensor(given_["own"], requires_grad=True)
        run_actor_loss(tensors, some, actor, CorrectionSettings(mode=correction), own=own).backward()
        assert own.grad is not None
        gradients.append(own.grad)
    assert torch.equal(*gradients)
    assert not gradients[0][tensors.mask == 0].any()
    assert gradients[0][tensors.mask == 1].any()


# Weights of tokens on which engine and trainer disagree.

LOG_RATIOS = [0.0, 0.5, 8.0, -0.5, -0.8, 1.5]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [1.0] * 6),
        ("tis", [1.0, 1.648721, 2.0, 0.606531, 0.449329, 2.0]),
        ("decoupled", [1.0, 1.648721, 2980.958, 0.606531, 0.449329, 4.481689]),
        ("icepop", [1.0, 1.648721, 0.0, 0.606531, 0.0, 4.481689]),
    ],
)
def test_the_weight_of_a_token_follows_from_its_ratio(mode: str, expected: list[float]) -> None:
    engine, state, options = torch.full((6,), -9.0), torch.ones(6), CorrectionSettings(mode=mode)
    trainer = engine + torch.tensor(LOG_RATIOS)
    torch.testing.assert_close(importance_weights(trainer, engine, state, options), torch.tensor(expected))
    metrics = compute_correction_metrics(trainer, engine, state, options)
    assert metrics["is_mean"] == pytest.approx(sum(expected) / 6, rel=1e-5)
    assert (metrics["is_max"], metrics["is_min"]) == pytest.approx((max(expected), min(expected)), rel=1e-5)
    assert metrics["is_masked"] == pytest.approx(expected.count(0.0) / 6)
    assert metrics["is_cut"] == pytest.approx(2 / 6 if mode == "tis" else 0.0)


@given(
    st.sampled_from(["none", "tis", "decoupled", "icepop"]),
    st.lists(st.tuples(st.floats(-30, 0), st.sampled_from([0.0, float("nan"), -5.0])), min_size=1, max_size=9),
)
def test_unsampled_tokens_have_weight_one(mode: str, tokens: list[tuple[float, float]]) -> None:
    trainer, engine = (torch.tensor(column) for column in zip(*tokens, strict=True))
    result = importance_weights(trainer, engine, torch.zeros(len(tokens)), CorrectionSettings(mode=mode))
    assert result.eq(1).all()


# The critic.


def run_critic_loss(tensors: StepTensors, given_: Matrices, trainer: TrainerSettings) -> torch.Tensor:
    config = build_critic_config(trainer)
    values = {name: torch.tensor(given_[name]) for name in ("values", "returns")}
    data = tensors.build(range(len(tensors)), values)
    output = {"values": lay_out_prediction(tensors, torch.tensor(given_["predicted"]))}
    loss, _ = value_loss(config, output, describe_batch(data, tensors))
    return loss


@pytest.mark.parametrize("agg", MODES)
def test_verls_value_loss_is_the_clipped_square_on_state_tokens(agg: str) -> None:
    settings = {"critic": {"cliprange_value": 0.3}, "actor": {"loss_agg_mode": agg, "loss_scale_factor": 7}}
    tensors, trainer = build_batch(), TrainerSettings.model_validate(settings)
    given_ = draw_matrices(tensors)
    close = np.clip(given_["predicted"], given_["values"] - 0.3, given_["values"] + 0.3)
    squares = np.maximum((given_["predicted"] - given_["returns"]) ** 2, (close - given_["returns"]) ** 2)
    result = run_critic_loss(tensors, given_, trainer)
    assert float(result) == pytest.approx(
        0.5 * aggregate(squares, tensors.mask.numpy(), agg if agg in MODES[:3] else MODES[0]), rel=1e-5
    )
    poisoned = {name: np.where(tensors.mask == 1, value, 99.0) for name, value in given_.items()}
    assert torch.equal(run_critic_loss(tensors, poisoned, trainer), result)


# Settings.


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.actor.loss_agg_mode=seq-mean-token-sum-norm", "give the longest response in tokens"),
        ("trainer.actor.loss_agg_mode=sum", "loss_agg_mode"),
        ("trainer.actor.clip_ratio_c=1", "clip_ratio_c"),
        ("trainer.critic_warmup=3", "adv_estimator grpo has none"),
        ("trainer.algorithm.rollout_correction.mode=truncate", "rollout_correction.mode"),
        ("trainer.algorithm.rollout_correction.icepop=[1.5, 5]", r"icepop is \[1\.5, 5\]: expected"),
    ],
)
def test_contradictory_settings_are_refused(override: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_settings(None, [override], {})
