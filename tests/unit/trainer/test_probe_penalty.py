"""The penalty for overconfidence: its metrics, and where its gradient is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forage_probe.metrics import overconfidence
from forage_runtime.errors import SettingsError
from forage_runtime.settings import load_settings
from forage_trainer.validation.probe_penalty import ProbePenalty, subtract_penalty

TABLE = Path(__file__).parents[2] / "data/probe/metrics.jsonl"
EXAMPLES = [json.loads(line) for line in TABLE.read_text().splitlines()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda row: row["why"])
def test_the_penalty_equals_the_specification_on_state_tokens_only(example: dict[str, Any]) -> None:
    state = torch.tensor([[1, 1, 0, 0, 1, 0]])
    before = torch.tensor([[0.3, 0.3, 0.0, -7.0, 0.3, 0.0]])
    sure = overconfidence([count / example["samples"] for count in example["correct"]])
    after = subtract_penalty(before, state, [sure], example["coefficient"])
    assert before[0, 0] - after[0, 0] == pytest.approx(example["penalty"], abs=1e-6)
    assert torch.equal(after[state == 0], before[state == 0])
    assert after[state == 1].unique().numel() == 1


@given(
    st.lists(st.one_of(st.none(), st.floats(-1.5, 1.5)), min_size=1, max_size=6),
    st.floats(0, 10),
    st.integers(0, 2**32 - 1),
)
def test_rows_that_were_not_probed_and_observation_tokens_keep_their_advantages(
    sure: list[float | None], coefficient: float, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    before = torch.randn(len(sure), 7, generator=chance)
    state = torch.randint(0, 2, before.shape, generator=chance).float()
    after = subtract_penalty(before, state, sure, coefficient)
    for row, one in enumerate(sure):
        kept = state[row] == 0 if one is not None else torch.ones(7, dtype=torch.bool)
        assert torch.equal(after[row][kept], before[row][kept])
        if one is not None:
            expected = before[row][~kept] - coefficient * one
            assert torch.allclose(after[row][~kept], expected, atol=1e-5)


def test_the_gradient_of_the_penalty_is_on_state_tokens_only() -> None:
    """Observations are trained on here, and are still none of the policy's overconfidence."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=12, global_batch_size=2)
    state = torch.tensor([[1.0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 1]])
    before = torch.full_like(state, 0.4)
    old = -torch.rand(state.shape, generator=torch.Generator().manual_seed(1))

    def compute_gradient(advantages: torch.Tensor) -> torch.Tensor:
        own = old.clone().requires_grad_()
        loss, _ = compute_policy_loss_vanilla(old, own, advantages, torch.ones_like(state), config=config)
        loss.backward()
        assert own.grad is not None
        return own.grad

    moved = compute_gradient(subtract_penalty(before, state, [0.75, -0.25], 2.0)) - compute_gradient(before)
    assert torch.equal(moved != 0, state == 1)
    assert (moved[0][state[0] == 1] > 0).all(), "descent makes the tokens of a hasty answer less likely"
    assert (moved[1][state[1] == 1] < 0).all(), "and those of a thoughtful one more"


@pytest.mark.parametrize("override", ["rollout.auth_token_file=/missing", "rollout.engine.max_lora_rank=8"])
def test_settings_that_rule_out_probes_are_refused_before_training(override: str) -> None:
    with pytest.raises(SettingsError, match=override.partition("=")[0]):
        ProbePenalty(load_settings(None, [override], {}))
