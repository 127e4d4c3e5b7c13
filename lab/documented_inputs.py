"""What readers of the documentation bring themselves, made small: settings, passages, questions, an index, rows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pages import REPOSITORY, read_blocks

Run = Callable[[str], int]
"""Runs a line of shell in the reader's folder; returns its exit code."""
_RECIPE = """\
data: {train_batch_size: 4}
retriever: {mode: bm25, topk: 2, threads: 1}
reward: {routes: {world_facts: {name: em}}}
rollout:
  n: 4
  max_start_length: 128
  max_response_length: 48
  max_obs_length: 128
  max_prompt_length: 448
  engine: {max_num_seqs: 32, max_model_len: 512}
trainer:
  actor: {ppo_mini_batch_size: 4}
"""
_VERL = "data: {train_batch_size: 256, max_response_length: 1024}\nalgorithm: {adv_estimator: grpo}\n"
_SCRIPT = "python3 -m verl.trainer.main_ppo data.train_batch_size=256 algorithm.adv_estimator=grpo\n"
_CONTEXT = 32_768
_PASSAGES = [
    {"id": str(n), "contents": f'"Place {n}"\nPlace {n} is a town.', "lang": "en", "year": 2000 + n} for n in range(64)
]
_SCORED = {"text": "<think>t</think><answer>Oslo</answer>", "targets": ["Oslo"], "data_source": "world_facts"}
_PUBLIC = [{"id": f"q_{n}", "question": f"where is place {n}", "golden_answers": [f"place {n}"]} for n in range(8)]


def bring(text: str, folder: Path, page: Path, run: Run) -> None:
    """Make what a command line reads and does not write, unless it is there."""
    if re.search(r"(-c|--config) configs/", text) and not (folder / "data/world").is_dir():
        run("forage data world")  # the data of our recipes
    for name, make in INPUTS:
        for found in re.finditer(rf"(?<![\w/.-])(?<!-o )(?<!--out )(?<!> )({name})(?![\w-])", text):
            target = folder / found[1]
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                make(target, page, run)


def _write_recipe(target: Path, page: Path, run: Run) -> None:
    target.write_text(_RECIPE, encoding="utf-8")
    if not (target.parent / "data/world").is_dir():
        run("forage data world")


def _write_script(target: Path, page: Path, run: Run) -> None:
    """The script of verl that the page shows, or one of ours."""
    shown = (block.text for block in read_blocks(page) if "main_ppo" in block.text)
    target.write_text(next(shown, _SCRIPT), encoding="utf-8")


def _write_lines(target: Path, rows: Sequence[object]) -> None:
    if target.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), target)
    else:
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _copy_model(target: Path, page: Path, run: Run) -> None:
    """The tiny policy with the context of a larger model."""
    shutil.copytree(REPOSITORY / "models/tiny-policy", target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = _CONTEXT
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _make_world(target: Path, page: Path, run: Run) -> None:
    run("forage data world")


def _build_index(target: Path, page: Path, run: Run) -> None:
    corpus = target.parent / "passages.jsonl"
    _write_lines(corpus, _PASSAGES)
    run(f"forage index build {target} --corpus {corpus} --mode hybrid")


def _write_gold(target: Path, page: Path, run: Run) -> None:
    _write_lines(target, [{"question": f"What is place {row['id']}?", "gold_ids": [row["id"]]} for row in _PASSAGES])


INPUTS: tuple[tuple[str, Callable[[Path, Path, Run], None]], ...] = (
    (r"(?:my|recipe|settings)\.yaml", _write_recipe),
    (r"[\w.-]+\.sh", _write_script),
    (r"ppo_trainer\.yaml", lambda target, page, run: target.write_text(_VERL, encoding="utf-8") and None),
    (r"models/my-model", _copy_model),
    (r"data/world(?=/)", _make_world),
    (r"(?:indexes/)?wiki(?:-2)?(?![\w/.]|-18)", _build_index),
    (r"questions\.jsonl", _write_gold),
    (r"docs\.parquet", lambda target, page, run: _write_lines(target, _PASSAGES)),
    (r"rows\.jsonl|rows\.parquet|row\.json", lambda target, page, run: _write_lines(target, [_SCORED])),
    (r"(?:train|dev|test)\.(?:jsonl|parquet)", lambda target, page, run: _write_lines(target, _PUBLIC)),
    (r"watch\.json", lambda target, page, run: None),
)
"""The name of a file or folder → what makes it."""
