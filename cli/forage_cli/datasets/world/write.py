"""Writing the world facts: corpus, questions in the Search-R1 layout, a manifest with digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forage_cli.datasets.manifest import write_manifest
from forage_cli.datasets.question_file import NUMBER, TEXT, TEXTS, make_question_row, write_question_rows
from forage_cli.datasets.world.corpus import make_passages
from forage_cli.datasets.world.facts import SOURCE_PACKAGES, Facts, load_facts
from forage_cli.datasets.world.questions import WorldQuestion, make_questions
from forage_runtime.text.search_prompt import PROMPT_PREFIX, format_search_prompt

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
    facts = load_facts()
    texts = make_passages(facts)
    written = write_data_set(out, seed, facts, "corpus.jsonl", {"passages": texts}, DATA_SOURCE, PROMPT_PREFIX)
    return WorldSummary(len(texts), *written)


def write_data_set(
    out: Path, seed: int, facts: Facts, file: str, rows: Mapping[str, Sequence[object]], data_source: str, prefix: str
) -> tuple[dict[str, int], dict[str, str]]:
    """Write `file`, questions in the Search-R1 layout and the manifest; return questions per split and digests by file.

    Args:
        rows: rows of `file`, each a line of JSON, by the name that the manifest gives to their number.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / file).open("w", encoding="utf-8", newline="\n") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for part in rows.values() for row in part)
    by_split = make_questions(facts, seed)
    info = {"split": TEXT, "index": NUMBER, "hops": NUMBER, "entities": TEXTS, "question": TEXT}
    for split, found in by_split.items():
        made = (_make_row(question, index, data_source, prefix) for index, question in enumerate(found))
        write_question_rows(out / f"{split}.parquet", made, {"target": TEXTS}, info, batch=len(found))
    questions = {split: len(found) for split, found in by_split.items()}
    counts = {"seed": seed, **{name: len(part) for name, part in rows.items()}, "questions": questions}
    names = [file, *(f"{split}.parquet" for split in by_split)]
    return questions, write_manifest(out, counts, names, (*SOURCE_PACKAGES, "pyarrow"))


def _make_row(question: WorldQuestion, index: int, data_source: str, prefix: str) -> dict[str, object]:
    info = {
        "split": question.split,
        "index": index,
        "hops": question.hops,
        "entities": list(question.entities),
        "question": question.text,
    }
    prompt = format_search_prompt(question.text, prefix)
    return make_question_row(data_source, prompt, "fact-reasoning", {"target": list(question.targets)}, info)
