"""verl's policy losses by name, as they are configured here, against the formulas of their papers in NumPy.

Each formula gives the loss of a token and its derivative by the token's log-probability, both in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loss_parts import Matrices, aggregate, build_batch, draw_matrices, run_actor_loss

from forage_runtime.errors import SettingsError
from forage_runtime.settings import ActorSettings, CorrectionSettings, load_settings
from forage_trainer.data.tensors import StepTensors

LOW, HIGH, DUAL = 0.2, 0.3, 3.0
TAU_POS, TAU_NEG, BETA, KL_COEF, KL_SHARE = 1.2, 1.7, 0.4, 0.3, 0.2
Formula = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
CORRECTIONS = ("none", "tis", "decoupled")


def clip_loss(ratio: np.ndarray, advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """max(-rA, -clip(r)A), and where the first is the larger one, so where a gradient flows."""
    plain, clipped = -advantages * ratio, -advantages * np.clip(ratio, 1 - LOW, 1 + HIGH)
    return np.maximum(plain, clipped), plain >= clipped


def vanilla(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """Dual-clip PPO (arXiv:1707.06347, arXiv:1912.09729)."""
    ratio = np.exp(own - old)
    loss, flows = clip_loss(ratio, advantages)
    bounded = (advantages < 0) & (loss > -advantages * DUAL)
    return np.where(bounded, -advantages * DUAL, loss), np.where(flows & ~bounded, -advantages * ratio, 0)


def gspo(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """Group sequence policy optimization (arXiv:2507.18071): the ratio of a row is its tokens' geometric mean."""
    mean = ((own - old) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
    ratio = np.broadcast_to(np.exp(mean), own.shape)
    loss, flows = clip_loss(ratio, advantages)
    return loss, np.where(flows, -advantages * ratio, 0)


def cispo(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """MiniMax-M1 (arXiv:2506.13585): REINFORCE with a clipped, constant weight."""
    weight = np.clip(np.exp(own - old), 1 - LOW, 1 + HIGH)
    return -weight * advantages * own, -weight * advantages


def sapo(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """Soft adaptive policy optimization (arXiv:2511.20347): a sigmoid gate in the place of clipping."""
    ratio, tau = np.exp(own - old), np.where(advantages > 0, TAU_POS, TAU_NEG)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return -advantages * gate * 4 / tau, -advantages * 4 * gate * (1 - gate) * ratio


def gpg(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """Group policy gradient (arXiv:2504.02546): REINFORCE."""
    return -own * advantages, -advantages


def dro(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """Direct reward optimization (arXiv:2405.19107): a squared log-ratio keeps the policy near."""
    far = own - old
    return -(own * advantages - BETA / 2 * far**2), -(advantages - BETA * far)


def clip_cov(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """Clip-Cov (arXiv:2505.22617), with every token of a covariance between the bounds chosen."""
    ratio = np.exp(own - old)
    loss, flows = clip_loss(ratio, advantages)
    chosen = (covariances(own, advantages, mask) > 0.1) & (covariances(own, advantages, mask) < 1.5) & flows
    return np.where(chosen, 0, loss), np.where(flows & ~chosen, -advantages * ratio, 0)


def kl_cov(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    """KL-Cov (arXiv:2505.22617): a penalty on the tokens of the highest covariances."""
    far = own - old
    covariance = np.where(mask == 1, covariances(own, advantages, mask), -np.inf)
    count = int(mask.sum() * KL_SHARE)
    chosen = covariance >= np.sort(covariance, axis=None)[-count]
    loss = -advantages * np.exp(far)
    return np.where(chosen, loss + KL_COEF * abs(far), loss), np.where(chosen, loss + KL_COEF * np.sign(far), loss)


def covariances(own: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    inside = mask == 1
    return (own - own[inside].mean()) * (advantages - advantages[inside].mean())


def dppo(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, near: np.ndarray) -> Any:
    """Divergence PPO (arXiv:2602.04879): no gradient where a binary divergence is too large already."""
    weight = np.minimum(np.exp(own - old), DUAL) * near
    return -advantages * weight * own, -advantages * weight


def dppo_tv(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    moved = np.exp(own) - np.exp(old)
    return dppo(own, old, advantages, np.where(advantages > 0, moved <= HIGH, moved >= -LOW))


def dppo_kl(own: np.ndarray, old: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> Any:
    p, q = np.exp(own), np.exp(old)
    kl = q * (old - own) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    near = np.where(advantages > 0, (kl <= HIGH) | (p <= q), (kl <= LOW) | (p >= q))
    return dppo(own, old, advantages, near)


FORMULAS: dict[str, Formula] = {
    one.__name__: one for one in (vanilla, gspo, cispo, sapo, gpg, dro, clip_cov, kl_cov, dppo_tv, dppo_kl)
}
PARAMETERS: dict[str, dict[str, float]] = {
    "dro": {"dro_beta": BETA},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.5},
    "kl_cov": {"kl_cov_ratio": KL_SHARE, "ppo_kl_coef": KL_COEF},
    "sapo": {"tau_pos": TAU_POS, "tau_neg": TAU_NEG},
}


def build_actor(mode: str, aggregation: str) -> ActorSettings:
    values: dict[str, Any] = {"loss_mode": mode, "args": PARAMETERS.get(mode, {})}
    return ActorSettings.model_validate(
        {"policy_loss": values, "loss_agg_mode": aggregation, "use_kl_loss": False, "clip_ratio": LOW}
        | {"clip_ratio_high": HIGH, "clip_ratio_c": DUAL}
    )


def draw(mode: str) -> tuple[StepTensors, Matrices]:
    """Probabilities below 1; one advantage a row where the loss knows one alone."""
    tensors = build_batch()
    given = draw_matrices(tensors, seed=3)
    given["old"] = np.minimum(given["old"], np.float32(-0.05))
    if mode == "geo_mean":
        given["advantages"][:] = given["advantages"][:, :1]
    return tensors, given


def compute_weights(given: Matrices, tensors: StepTensors, correction: str) -> np.ndarray:
    """p_trainer / p_engine, at most 2 with tis."""
    if correction == "none":
        return np.ones(tensors.mask.shape)
    ratio = np.exp(given["old"].astype(np.float64) - given["engine"])
    return np.where(tensors.state.numpy() == 1, np.minimum(ratio, 2) if correction == "tis" else ratio, 1)


def run_loss(
    tensors: StepTensors, given: Matrices, actor: ActorSettings, correction: str, rows: list[int] | None = None
) -> tuple[float, np.ndarray]:
    own = torch.tensor(given["own"], requires_grad=True)
    loss = run_actor_loss(tensors, given, actor, CorrectionSettings(mode=correction), rows, own)
    loss.backward()
    assert own.grad is not None
    return float(loss.detach()), own.grad.numpy()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(
    ("mode", "aggregation"),
    [*((mode, "seq-mean-token-mean") for mode in FORMULAS), *((m, "token-mean") for m in FORMULAS if m != "sapo")],
)
def test_a_policy_loss_and_its_gradient_equal_the_paper(mode: str, aggregation: str, correction: str) -> None:
    tensors, given = draw(mode)
    mask = tensors.mask.numpy().astype(np.float64)
    own, old, advantages = (given[name].astype(np.float64) for name in ("own", "old", "advantages"))
    losses, slopes = FORMULAS[mode](own, old, advantages, mask)
    weights = compute_weights(given, tensors, correction)
    result, gradient = run_loss(tensors, given, build_actor(mode, aggregation), correction)
    assert result == pytest.approx(aggregate(losses * weights, mask, aggregation), rel=1e-4, abs=1e-6)
    share = mask / mask.sum() if aggregation == "token-mean" else mask / mask.sum(1, keepdims=True) / len(mask)
    np.testing.assert_allclose(gradient, slopes * weights * share, rtol=2e-4, atol=1e-6)
    assert len(set(np.sign(slopes[mask == 1]))) > 1


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_geo_mean_equals_the_paper(correction: str) -> None:
    """GMPO (arXiv:2507.20673): the geometric mean of clipped ratios, and of their importance weights."""
    tensors, given = draw("geo_mean")
    mask = tensors.mask.numpy().astype(np.float64)
    own, old, advantages = (given[name].astype(np.float64) for name in ("own", "old", "advantages"))
    far, sign = own - old, np.sign(advantages)
    kept = sign * far <= sign * np.clip(far, -LOW, HIGH)
    lengths = mask.sum(1)
    ratio = np.exp((np.where(kept, far, np.clip(far, -LOW, HIGH)) * mask).sum(1) / lengths)
    weight = np.exp((np.log(compute_weights(given, tensors, correction)) * mask).sum(1) / lengths)
    rows = -advantages[:, 0] * ratio * weight
    result, gradient = run_loss(tensors, given, build_actor("geo_mean", "seq-mean-token-mean"), correction)
    assert result == pytest.approx(rows.mean(), rel=1e-4)
    expected = (rows / lengths / len(rows))[:, None] * kept * mask
    np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [*(mode for mode in FORMULAS if not mode.endswith("_cov")), "geo_mean"])
def test_a_loss_does_not_depend_on_how_rows_are_cut_into_micro_batches(mode: str) -> None:
    """Of clip_cov and kl_cov the tokens are chosen within a micro-batch."""
    tensors, given = draw(mode)
    actor = build_actor(mode, "seq-mean-token-mean")
    whole, gradient = run_loss(tensors, given, actor, "tis")
    parts = [run_loss(tensors, given, actor, "tis", rows) for rows in ([0], [1, 2, 3])]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(sum(one for _, one in parts), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["policy_loss.loss_mode=gspoo"], "gspo"),
        (["policy_loss.loss_mode=bypass_mode"], "vanilla"),
        (["policy_loss.loss_mode=sapo"], "sapo is a mean over trajectories, not token-mean"),
        (
            ["policy_loss.args.kl_cov_ratio=0.1"],
            "args has kl_cov_ratio, and loss_mode vanilla takes none: leave it out",
        ),
        (
            ["policy_loss.loss_mode=kl_cov", "policy_loss.args.beta=1"],
            "takes kl_cov_ratio and ppo_kl_coef: leave it out",
        ),
        (["policy_loss.loss_mode=a.py:f", "policy_loss.args.beta=1"], "args has beta, and loss_mode a.py:f takes none"),
        (["policy_loss.loss_mode=dro"], r"dro needs args\.dro_beta: a number above 0"),
        (
            ["policy_loss.loss_mode=dro", "policy_loss.args.dro_beta=0"],
            "dro_beta of loss_mode dro is 0: expected a number",
        ),
        (["policy_loss.loss_mode=clip_cov", "policy_loss.args.clip_cov_lb=6"], "must be below args.clip_cov_ub"),
        (["policy_loss.loss_mode=geo_mean", "loss_agg_mode=seq-mean-token-mean"], None),
    ],
)
def test_a_setting_of_another_loss_is_named(settings: list[str], message: str | None) -> None:
    given = [f"trainer.actor.{one}" for one in settings]
    if message is None:
        load_settings(None, given, {})
        for more, why in (
            ("adv_estimator=grpo_multiturn", "one advantage a trajectory"),
            ("probe_penalty.coef=0.1", "probe_penalty gives each token its own"),
            ("rollout_correction.mode=icepop", "one weight a trajectory"),
        ):
            with pytest.raises(SettingsError, match=why):
                load_settings(None, [*given, f"trainer.algorithm.{more}"], {})
        return
    with pytest.raises(SettingsError, match=message):
        load_settings(None, given, {})
