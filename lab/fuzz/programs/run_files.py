"""Files of runs and data: Parquet, JSON lines, YAML. In the environment of the console."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from console_client import ConsoleClient
from console_runs import Demo, write_demo

from forage_records.events import parse_events, read_events
from forage_records.questions import read_questions
from forage_records.step_file import read_group_fates, read_step
from forage_records.trajectory_file import read_header, read_ids, read_trajectories
from forage_runtime.files.parquet_rows import json_lines
from forage_runtime.settings import load_settings

REFUSALS: dict[str, tuple[type[Exception], ...]] = {}
_RUN = "made"
_PAGES = ("/curves", "/steps/{step}", "/trajectories", "/questions", "/facets", "/trajectories/step-{step}/0")
_BEGAN = 1_700_000_000.0


def list_good_files(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(reader, name, content) of good files."""
    run = _write_run(folder)
    for file in sorted(run.rglob("*")):
        if not file.is_file() or file.is_symlink():
            continue
        name = str(file.relative_to(run))
        yield "page", name, file.read_bytes()
        if file.suffix == ".parquet":
            yield "step", name, file.read_bytes()
            yield "rows", name, file.read_bytes()
        if name == "events.jsonl":
            yield "events", name, file.read_bytes()
        if name == "settings.yaml":
            yield "settings", name, file.read_bytes()
    yield "questions", "questions.parquet", _write_questions(folder / "questions.parquet")
    tree = load_settings(None, [], {}).model_dump(mode="json")
    yield "settings", "settings.yaml", yaml.safe_dump(tree).encode()


def make_readers(folder: Path) -> dict[str, Callable[[Path, str], Any]]:
    """The readers by name. Each takes the path of a file, and the name that it has in a run."""
    runs = folder
    run = _write_run(runs)
    client = ConsoleClient(runs)
    step = _find_step(run)

    def read_pages(file: Path, name: str) -> None:
        good = (run / name).read_bytes()
        shutil.copyfile(file, run / name)
        try:
            for page in (_PAGES[file.stat().st_size % len(_PAGES)], ""):
                reply = client.ask(f"/runs/{_RUN}{page.format(step=step)}")
                assert reply.status_code < 500 or reply.status_code == 503, f"{page}: {reply.status_code} {reply.text}"
        finally:
            (run / name).write_bytes(good)

    def read_step_file(file: Path, name: str) -> None:
        read_header(file)
        read_ids(file)
        read_group_fates(file)
        for row in read_step(file):
            _ = row.advantage_mean, row.search_advantage, row.mismatch_max
        list(read_trajectories(file))

    return {
        "page": read_pages,
        "step": read_step_file,
        "rows": lambda file, name: list(json_lines(file)),
        "questions": lambda file, name: read_questions([file]),
        "events": lambda file, name: (list(parse_events(file.read_text(errors="replace"))), read_events(file.parent)),
        "settings": lambda file, name: load_settings(file, [], {}),
    }


def _write_run(runs: Path) -> Path:
    return write_demo(runs / _RUN, Demo(began=_BEGAN))


def _find_step(run: Path) -> int:
    return min(int(file.stem.rpartition("-")[2]) for file in (run / "trajectories").glob("step-*.parquet"))


def _write_questions(file: Path) -> bytes:
    rows = [
        {
            "data_source": "world_facts",
            "prompt": [{"role": "user", "content": f"What is {n}?"}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [f"n{n}"]}},
            "extra_info": {"split": "train", "index": n, "question": "What?"},
        }
        for n in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.read_bytes()
