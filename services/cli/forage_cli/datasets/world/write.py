"""Writing the world facts: corpus, questions in the Search-R1 layout, a manifest with digests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from forage_cli.datasets.manifest import write_manifest
from forage_cli.datasets.question_file import NUMBER, TEXT, TEXTS, make_question_row, write_question_rows
from forage_cli.datasets.world.corpus import make_passages
from forage_cli.datasets.world.facts import SOURCE_PACKAGES, load_facts
from forage_cli.datasets.world.questions import Question, make_questions
from forage_common.text.search_prompt import PROMPT_PREFIX, format_search_prompt

DATA_SOURCE = "world_facts"


@dataclass(frozen=True)
class WorldSummary:
    """Result of `build_world`: number of passages, questions per split, and SHA-256 digests by file name."""

    passages: int
    questions: dict[str, int]
    digests: dict[str, str]


def build_world(out: Path, seed: int) -> WorldSummary:
    """Write `corpus.jsonl`, `{train,validation,test}.parquet`, `manifest.json` to `out` (created if missing).

    The same seed and the same package versions give the same bytes.
    """
    out.mkdir(parents=True, exist_ok=True)
    facts = load_facts()
    texts = make_passages(facts)
    by_split = make_questions(facts, seed)
    with (out / "corpus.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        for text in texts:
            lines.write(json.dumps(text, ensure_ascii=False) + "\n")
    for split, found in by_split.items():
        write_questions(out / f"{split}.parquet", found, DATA_SOURCE, PROMPT_PREFIX)
    questions = {split: len(found) for split, found in by_split.items()}
    names = ["corpus.jsonl", *(f"{split}.parquet" for split in by_split)]
    counts = {"seed": seed, "passages": len(texts), "questions": questions}
    return WorldSummary(len(texts), questions, write_manifest(out, counts, names, (*SOURCE_PACKAGES, "pyarrow")))


def write_questions(path: Path, found: list[Question], data_source: str, prefix: str) -> None:
    """Write questions as Parquet in the Search-R1 layout."""
    info = {"split": TEXT, "index": NUMBER, "hops": NUMBER, "entities": TEXTS, "question": TEXT}
    rows = (_make_row(question, index, data_source, prefix) for index, question in enumerate(found))
    write_question_rows(path, rows, {"target": TEXTS}, info, batch=len(found))


def _make_row(question: Question, index: int, data_source: str, prefix: str) -> dict[str, object]:
    info = {
        "split": question.split,
        "index": index,
        "hops": question.hops,
        "entities": list(question.entities),
        "question": question.text,
    }
    prompt = format_search_prompt(question.text, prefix)
    return make_question_row(data_source, prompt, "fact-reasoning", {"target": list(question.targets)}, info)
