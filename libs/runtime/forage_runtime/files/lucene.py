"""Recognises BM25 indexes of Lucene, as pyserini and Search-R1 use them: Forage builds its own from the corpus."""

from __future__ import annotations

import re
from pathlib import Path

_SEGMENTS = re.compile(r"segments_[0-9a-z]+")
_SEGMENT_FILE = re.compile(r"_[0-9a-z]+(_\w+)?\.(cfs|cfe|si|fdt|fdx|fnm|doc|tim|tip)")
_PREBUILT = re.compile(
    r"(wikipedia-(dpr|kilt)|(en|zh)wiki-paragraphs|wiki-all-\d|msmarco-(v\d|passage|doc)|beir-v|mrtydi-v|miracl-v"
    r"|lucene-(index|inverted)[.-])[\w.-]*"
)
"""Names of pyserini's prebuilt indexes, which it downloads itself."""

_BESIDE = ("*.jsonl", "*.jsonl.gz", "*.parquet")


def is_lucene_folder(folder: Path) -> bool:
    """Whether a folder is a Lucene index: one that is complete, or one of which files are missing."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return False
    return any(map(_SEGMENTS.fullmatch, names)) or sum(map(bool, map(_SEGMENT_FILE.fullmatch, names))) >= 2


def explain_lucene(folder: Path) -> str | None:
    """The sentence that refuses a Lucene index and says how to build one of Forage; None if it is none.

    Args:
        folder: the index itself, a folder with it in `bm25`, or a name of pyserini's instead of a folder.
    """
    found = next((one for one in (folder, folder / "bm25") if is_lucene_folder(one)), None)
    if found is not None:
        what = f"{found} is a BM25 index of Lucene (pyserini), which needs Java and is not read"
        corpus = _find_corpus(found)
    elif not folder.exists() and len(folder.parts) == 1 and _PREBUILT.fullmatch(folder.name):
        what, corpus = f"{folder} is no folder, and looks like an index of pyserini, which is not read", "CORPUS.jsonl"
    else:
        return None
    command = f"forage index build {_name_target(found or folder)} --mode bm25 --corpus {corpus}"
    return f"{what}: build it again from its passages with `{command}`"


def _find_corpus(folder: Path) -> str:
    """The corpus beside an index, as Search-R1 has it, or a placeholder."""
    beside = (file for place in (folder.parent, folder) for kind in _BESIDE for file in sorted(place.glob(kind)))
    return str(next(beside, "CORPUS.jsonl"))


def _name_target(folder: Path) -> str:
    return str(folder.with_name(f"{folder.name}-forage"))
