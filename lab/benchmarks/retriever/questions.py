"""The corpus and questions: a folder with corpus.jsonl.gz and queries.jsonl.gz, or the bundled world facts."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forage_retriever.command.questions import GoldQuestion, read_questions

REPOSITORY = Path(__file__).resolve().parents[3]
CACHE = REPOSITORY / ".cache/bench"
WORLD = CACHE / "world"
SPLIT = "test"


@dataclass(frozen=True)
class Data:
    """A corpus and questions, each with the ids of the passages that answer it together.

    Attributes:
        name: for tables.
        corpus: file of passages.
        file: of the questions.
    """

    name: str
    corpus: Path
    file: Path

    @cached_property
    def questions(self) -> list[GoldQuestion]:
        return read_questions(self.file)


def load() -> Data:
    """The data of FORAGE_BENCH_DATA; the world facts, generated on the first run, where that is unset."""
    folder = os.environ.get("FORAGE_BENCH_DATA")
    if folder:
        return Data(Path(folder).name, Path(folder) / "corpus.jsonl.gz", Path(folder) / "queries.jsonl.gz")
    data = Data("world facts", WORLD / "corpus.jsonl", WORLD / "questions.jsonl")
    if not data.file.is_file():
        _make_world(data)
    return data


def _make_world(data: Data) -> None:
    """Questions with the passages of all their hops as gold passages."""
    common = REPOSITORY / ".venvs/cli/bin"  # has the packages that the facts come from, and Parquet
    subprocess.run([common / "forage", "data", "world", "--out", WORLD], check=True)
    rows = subprocess.check_output(
        [common / "python", "-m", "forage_runtime.files.parquet_rows", WORLD / f"{SPLIT}.parquet"]
    )
    with data.corpus.open(encoding="utf-8") as lines:
        passages = [json.loads(line) for line in lines]
    id_of = {passage["contents"].partition("\n")[0].strip('"'): passage["id"] for passage in passages}
    with data.file.open("w", encoding="utf-8") as file:
        for asked in (json.loads(row)["extra_info"] for row in rows.split("\n") if row):
            gold = [id_of[name] for name in asked["entities"]]
            row = {"question": asked["question"], "gold_ids": gold, "source": f"{asked['hops']} hops"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
