"""Twelve families from names to loads: published, packed where rows stay apart, and served as they were trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family_training import find_packing_problem, write_tokenizer
from model_families import VOCABULARY
from published_family import check_published, publish_family
from scored_rows import draw_rows, score_rows
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(1800)
PACKED: dict[str, str] = {
    "falcon_h1": "depends on the row before it",
    "gemma2": "has softcap",
    "gpt_oss": "has s_aux",
    "granite": "",
    "granitemoe": "",
    "granitemoehybrid": "depends on the row before it",
    "llama": "",
    "mixtral": "",
    "olmoe": "",
    "qwen2_moe": "",
    "qwen3": "",
    "qwen3_moe": "",
}
"""Families, and why their rows are not packed with varlen; empty: they are."""


@pytest.mark.parametrize("kind", PACKED)
def test_a_family_is_published_packed_and_served_as_it_was_trained(kind: str, tmp_path: Path, repository: Path) -> None:
    model = publish_family(kind, tmp_path)
    check_published(model, tmp_path)
    rows, start = draw_rows(VOCABULARY), tmp_path / "start"
    begun = AutoModelForCausalLM.from_pretrained(start).eval()
    scores = {"rows": rows, "start": score_rows(begun, rows), "published": score_rows(model.eval(), rows)}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    write_tokenizer(start)
    problem, reason = find_packing_problem(start, "varlen"), PACKED[kind]
    assert problem is None if not reason else reason in str(problem)
    result = serve(repository, tmp_path)
    assert is_right(result["served"])
    assert is_right(result.get("in_place"))


def is_right(compared: dict[str, float] | None) -> bool:
    return compared is not None and compared["mean"] <= compared["bound"]


def serve(repository: Path, folder: Path) -> dict[str, Any]:
    """What an engine makes of the folder, by the rollout's environment."""
    python = repository / ".venvs/rollout/bin/python"
    command = [str(python if python.exists() else sys.executable), "tests/support/family_serving.py", str(folder)]
    output = subprocess.run(command, cwd=repository, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(output.stdout.strip().splitlines()[-1]))
