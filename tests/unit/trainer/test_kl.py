"""The KL in the reward, its controller, and the settings that keep it out of the loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forage_runtime.errors import SettingsError
from forage_runtime.settings import KlControlSettings, load_settings
from forage_trainer.algorithms.kl import KlController, apply_kl_penalty

DATA = Path(__file__).parents[2] / "data/trainer"
KINDS = ("kl", "abs", "mse", "low_var_kl")


def load_examples(name: str) -> Any:
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    return pytest.mark.parametrize("example", rows, ids=lambda e: e["id"])


def evaluate_formula(kind: str, log_prob: float, reference: float) -> float:
    d = reference - log_prob
    if kind == "low_var_kl":
        return min(max((math.exp(d) if d < 700 else math.inf) - d - 1, -10.0), 10.0)
    return {"kl": -d, "abs": abs(d), "mse": 0.5 * d * d}[kind]


@load_examples("kl")
def test_each_kind_follows_the_specification(example: dict[str, Any]) -> None:
    log_probs, reference = torch.tensor(example["log_prob"]), torch.tensor(example["reference"])
    if example["error"]:
        for key in ("actor.kl_loss_type", "algorithm.kl_penalty"):
            with pytest.raises(SettingsError, match=key):
                load_settings(None, [f"trainer.{key}={example['kind']}"], {})
        return
    zero, mask = torch.zeros_like(log_probs), torch.ones_like(log_probs)
    result = apply_kl_penalty(zero, log_probs, reference, mask, example["kind"], 1.0)
    torch.testing.assert_close(-result.token_rewards, torch.tensor(example["kl"]), atol=1e-4, rtol=0)


@load_examples("apply_kl_penalty")
def test_the_penalty_follows_the_specification(example: dict[str, Any]) -> None:
    rewards, log_probs, reference, mask = (
        torch.tensor(example[name]).float() for name in ("token_rewards", "log_probs", "reference", "mask")
    )
    result = apply_kl_penalty(rewards, log_probs, reference, mask, example["kind"], example["beta"])
    torch.testing.assert_close(result.token_rewards, torch.tensor(example["penalised"]), atol=1e-6, rtol=0)
    assert result.kl == pytest.approx(example["kl"], abs=1e-6)


log_prob = st.floats(-40, 0)
token = st.tuples(log_prob, log_prob, st.booleans(), st.floats(-1, 1))


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(token, min_size=n, max_size=n).filter(lambda r: any(t[2] for t in r)), min_size=1)
    ),
    st.sampled_from(KINDS),
    st.sampled_from([math.nan, math.inf, -7.0]),
)
def test_only_tokens_of_the_mask_are_penalized(
    rows: list[list[tuple[float, float, bool, float]]], kind: str, junk: float
) -> None:
    mask = torch.tensor([[t[2] for t in row] for row in rows])
    columns = [torch.tensor([[t[i] for t in row] for row in rows], dtype=torch.double) for i in (0, 1, 3)]
    own, reference = (part.masked_fill(~mask, junk) for part in columns[:2])
    result = apply_kl_penalty(columns[2], own, reference, mask.float(), kind, 0.3)
    means = []
    for i, row in enumerate(rows):
        paid = [evaluate_formula(kind, a, b) if inside else 0.0 for a, b, inside, _ in row]
        expected = [reward - 0.3 * k for (_, _, _, reward), k in zip(row, paid, strict=True)]
        assert result.token_rewards[i].tolist() == pytest.approx(expected, abs=1e-6)
        means.append(sum(paid) / sum(t[2] for t in row))
    assert result.kl == pytest.approx(sum(means) / len(means), abs=1e-6)
    assert result.non_finite == 0


def test_a_token_with_a_non_finite_kl_is_not_penalized_and_is_counted() -> None:
    own, reference = torch.tensor([[-1.0, math.nan, -2.0]]), torch.tensor([[-2.0, -1.0, -1.0]])
    result = apply_kl_penalty(torch.zeros(1, 3), own, reference, torch.ones(1, 3), "kl", 0.5)
    assert result.token_rewards.tolist() == [[-0.5, 0.0, 0.5]]
    assert result.non_finite == 1
    assert math.isnan(result.kl)


# The controller.


@load_examples("adaptive_kl")
def test_the_controller_follows_the_specification(example: dict[str, Any]) -> None:
    given = {name: example[name] for name in ("kl_coef", "target_kl", "horizon")}
    if example["error"]:
        overrides = [f"trainer.algorithm.kl_ctrl.{name}={value}" for name, value in given.items()]
        with pytest.raises(SettingsError, match="target_kl"):
            load_settings(None, ["trainer.algorithm.kl_ctrl.type=adaptive", *overrides], {})
        return
    controller, betas = KlController(KlControlSettings(type="adaptive", **given)), []
    for kl, rows in example["updates"]:
        controller.update(kl, rows)
        betas.append(controller.beta)
    assert betas == pytest.approx(example["betas"], abs=1e-9)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_non_finite_kl_leaves_beta_and_is_counted(kl: float) -> None:
    controller = KlController(KlControlSettings(type="adaptive", kl_coef=0.2))
    controller.update(kl, 512)
    assert (controller.beta, controller.skipped) == (0.2, 1)
    controller.update(1.0, 512)
    assert controller.beta == pytest.approx(0.2 * (1 + 0.2 * 512 / 10000))


def test_a_fixed_coefficient_stays() -> None:
    controller = KlController(KlControlSettings(kl_coef=0.2))
    controller.update(50.0, 512)
    assert controller.beta == 0.2


def test_a_controller_resumes_from_its_state() -> None:
    adaptive = KlControlSettings(type="adaptive", kl_coef=0.2)
    one = KlController(adaptive)
    one.update(5.0, 512)
    one.update(math.nan, 512)
    other = KlController(adaptive)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (other.beta, other.skipped) == (one.beta, 1)
    fixed = KlController(KlControlSettings(kl_coef=0.7))
    fixed.load_state_dict(one.state_dict())
    assert fixed.beta == 0.7


# Settings.


def test_the_kl_is_never_in_reward_and_loss_both() -> None:
    with pytest.raises(SettingsError, match=r"in the reward or in the loss, never in both"):
        load_settings(None, ["trainer.algorithm.use_kl_in_reward=true"], {})
    settings = load_settings(None, ["trainer.algorithm.use_kl_in_reward=true", "trainer.actor.use_kl_loss=false"], {})
    assert settings.trainer.algorithm.use_kl_in_reward


def test_an_estimator_that_would_lose_the_kl_is_refused() -> None:
    given = ["use_kl_in_reward=true", "adv_estimator=grpo_multiturn"]
    with pytest.raises(SettingsError, match="KL in the reward would be lost"):
        load_settings(None, ["trainer.actor.use_kl_loss=false", *(f"trainer.algorithm.{one}" for one in given)], {})
