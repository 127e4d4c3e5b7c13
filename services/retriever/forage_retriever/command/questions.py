"""Questions with known answers: JSON lines (`.jsonl`, `.jsonl.gz`).

A line has `question`, `gold_ids` (the passages that answer it together) and, where there are several sources, `source`.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from forage_runtime.errors import DataError

_TEXT = "utf-8-sig"
"""UTF-8 with or without a mark at its beginning, as in a corpus."""


@dataclass(frozen=True)
class GoldQuestion:
    """A question, the ids of the passages that answer it together, and its source."""

    text: str
    gold_ids: frozenset[str]
    source: str


def read_questions(file: Path) -> list[GoldQuestion]:
    """The questions of a file.

    Raises:
        DataError: it cannot be read, or a line is not a question; names the line and the field.
    """
    questions = []
    try:
        with gzip.open(file, "rt", encoding=_TEXT) if file.suffix == ".gz" else file.open(encoding=_TEXT) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    questions.append(_parse_question(line, f"{file}:{number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"questions {file} cannot be read ({error}): give a JSONL file") from None
    if not questions:
        raise DataError(f"questions {file} has no lines: write one JSON object with question and gold_ids a line")
    return questions


def _parse_question(line: str, where: str) -> GoldQuestion:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}): write one JSON object a line") from None
    text, gold = (row.get("question"), row.get("gold_ids")) if isinstance(row, dict) else (None, None)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: field 'question' is {text!r}: give the question's text")
    if not isinstance(gold, list) or not gold or not all(isinstance(id, str | int) for id in gold):
        raise DataError(f"{where}: field 'gold_ids' is {gold!r}: give a list of passage ids")
    return GoldQuestion(text, frozenset(str(id) for id in gold), str(row.get("source") or ""))
