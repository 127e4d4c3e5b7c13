"""Questions in FlashRAG's layout, some of them without a question or an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS: list[dict[str, Any]] = [
    {"id": "train_0", "question": "who got the first nobel prize in physics", "golden_answers": ["Wilhelm Röntgen"]},
    {"id": "train_1", "question": " When was it? ", "golden_answers": ["1901", " ", "in 1901"], "metadata": {"a": 1}},
    {"id": "train_2", "question": "  ", "golden_answers": ["x"]},
    {"id": "train_3", "question": "nobody knows?", "golden_answers": []},
    {"id": "train_4", "question": "last one", "golden_answers": "alone"},
]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a line of JSON a row, and return the file."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file
