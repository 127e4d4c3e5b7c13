"""JSON of a run's folder, whose texts can all be written again."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    r"""As `json.loads`; halves of surrogate pairs (`"\ud800"`), which are no characters, become question marks.

    UTF-8, Parquet, databases and replies cannot hold such a half.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deep.
    """
    tree = json.loads(text)
    marks = (b"\\ud", b"\\uD") if isinstance(text, bytes) else ("\\ud", "\\uD")
    if not any(mark in text for mark in marks):  # type: ignore[operator]
        return tree
    return json.loads(json.dumps(tree, ensure_ascii=False).encode("utf-8", "replace"))
