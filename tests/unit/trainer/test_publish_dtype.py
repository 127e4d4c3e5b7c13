"""The type of published weights is what the engines compute in, unless a setting names another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forage_runtime.settings import load_settings
from forage_trainer.weights.publication import choose_dtype

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("publish", "engine", "declared", "model", "expected"),
    [
        ("float16", "bfloat16", "float32", "bfloat16", F16),
        ("float32", "auto", "bfloat16", "bfloat16", F32),
        ("auto", "bfloat16", "float32", "float32", BF16),
        ("auto", "half", "float32", "float32", F16),
        ("auto", "float", "bfloat16", "bfloat16", F32),
        ("auto", "auto", "bfloat16", "float32", BF16),
        ("auto", "auto", "float32", "bfloat16", F32),
        ("auto", "auto", "float16", "bfloat16", F16),
        ("auto", "auto", "", "bfloat16", BF16),
        ("auto", "auto", "", "float32", F32),
        ("auto", "auto", "", None, F32),
    ],
)
def test_the_first_name_of_a_type_counts(
    tmp_path: Path, publish: str, engine: str, declared: str, model: str | None, expected: torch.dtype
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({} if model is None else {"dtype": model}))
    named = [f"trainer.publish.dtype={publish}", f"rollout.engine.dtype={engine}", f"model.path={tmp_path}"]
    assert choose_dtype(load_settings(overrides=named, environ={}), declared) == expected


def test_an_older_configuration_names_its_type_in_another_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert choose_dtype(load_settings(overrides=[f"model.path={tmp_path}"], environ={}), "") == BF16
