"""Which engine the settings ask for, and how a CPU cuts its work."""

from __future__ import annotations

import pytest
import torch
from arrived_groups import arrive
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from trainer_parts import make_group
from verl.utils.seqlen_balancing import rearrange_micro_batches

from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import TrainingEngineSettings, load_settings
from forage_trainer.data.tensors import is_valid, leave_out_unusable
from forage_trainer.engine import engine_config
from forage_trainer.engine.cpu_engine import cut_micro_batches, split_cuts
from forage_trainer.engine.engine_config import resolve_engine


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 1000), st.data())
def test_micro_batches_have_the_number_that_another_process_needs(
    lengths: list[int], budget: int, data: st.DataObject
) -> None:
    at_least = data.draw(st.integers(1, len(lengths)))
    free, cuts = cut_micro_batches(lengths, budget), split_cuts(cut_micro_batches(lengths, budget), at_least)
    assert len(cuts) == max(at_least, len(free))
    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[row] for row in cut) <= budget


@pytest.mark.parametrize(
    "setting",
    [
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": "flex_attention"},
        {"param_dtype": "bf16"},
        {"args": {"param_offload": True}},
        {"args": {"optimizer_offload": True}},
        {"args": {"offload_policy": True}},
    ],
)
def test_settings_that_need_a_gpu_are_refused_without_one(setting: dict[str, object]) -> None:
    ((name, value),) = setting.items()
    if isinstance(value, dict):
        ((argument, value),) = value.items()
        name = f"args.{argument}"
    with pytest.raises(UserError, match=rf"trainer\.engine\.{name}={value} needs a GPU"):
        resolve_engine(TrainingEngineSettings.model_validate(setting), on_gpu=False)


def test_engine_defaults_follow_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(on_gpu: bool, **asked: object) -> tuple[object, ...]:
        chosen = resolve_engine(TrainingEngineSettings.model_validate(asked), on_gpu)
        return chosen.attn_implementation, chosen.use_remove_padding, chosen.use_fused_kernels, chosen.param_dtype

    assert choose(on_gpu=False) == ("sdpa", False, False, "fp32")
    assert choose(on_gpu=False, use_remove_padding=True, use_fused_kernels=True) == ("varlen", True, True, "fp32")
    assert choose(on_gpu=True) == ("varlen", True, True, "bf16")
    assert choose(on_gpu=True, use_remove_padding=False) == ("sdpa", False, True, "bf16")
    assert choose(on_gpu=True, attn_implementation="sdpa", use_fused_kernels=False) == ("sdpa", False, False, "bf16")
    with pytest.raises(UserError, match="needs the package flash_attn"):
        choose(on_gpu=True, attn_implementation="flash_attention_2")
    monkeypatch.setattr(engine_config, "find_spec", lambda _: object())
    assert choose(on_gpu=True) == ("flash_attention_2", True, True, "bf16")
    assert resolve_engine(TrainingEngineSettings(), on_gpu=True).enable_gradient_checkpointing


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("engine.args.fsdp_size=0", "fsdp_size is 0"),
        ("engine.attn_implementation=fast", "attn_implementation"),
        ("engine.param_dtype=int8", "param_dtype"),
        ("lora.lora_rank=-1", "lora_rank"),
    ],
)
def test_contradictory_engine_settings_are_named(setting: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(None, [f"trainer.{setting}"], {})


@pytest.mark.parametrize(
    ("attention", "packed", "reason"),
    [
        ("sdpa", "true", "use_remove_padding needs attn_implementation varlen.*not sdpa"),
        ("varlen", "false", "varlen needs packed rows"),
    ],
)
def test_attention_and_layout_of_rows_fit_each_other(attention: str, packed: str, reason: str) -> None:
    settings = [f"trainer.engine.attn_implementation={attention}", f"trainer.engine.use_remove_padding={packed}"]
    with pytest.raises(SettingsError, match=reason):
        load_settings(None, settings, {})


@pytest.mark.parametrize(("room", "is_left_out"), [(0, False), (-1, True)])
def test_what_verl_refuses_on_gpus_is_left_out_before_and_nothing_else(room: int, is_left_out: bool) -> None:
    """On GPUs verl cuts micro-batches by this function; on CPUs a row that is too long is alone in one."""
    group = make_group("a", [0.0, 1.0])
    rows = [torch.tensor(trajectory.token_ids) for trajectory in group.trajectories]
    limit = max(map(len, rows)) + room
    batch = TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(rows))
    if is_left_out:
        with pytest.raises(AssertionError, match="max_token_len must be greater than the sequence length"):
            rearrange_micro_batches(batch, limit)
    else:
        assert len(rearrange_micro_batches(batch, limit)[0]) == len(rows)
    assert sum(map(len, cut_micro_batches([len(row) for row in rows], limit))) == len(rows)
    chosen = load_settings(None, [f"trainer.actor.ppo_max_token_len_per_gpu={limit}"], {})
    ((left,), _) = leave_out_unusable([arrive(group)], chosen.trainer)
    assert [is_valid(trajectory) for trajectory in left.trajectories] == [not is_left_out] * len(rows)
