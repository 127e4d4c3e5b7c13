"""What a retriever searches: how many passages, in which type of index, and who encodes the queries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings, Settings

KNOWN = {"wiki-18": 21_015_324}
"""Passages of corpora that recipes name by the name of their folder, before they are here."""

MINILM = "minilm"
_COUNTED_BYTES = 2**28


@dataclass(frozen=True)
class Corpus:
    """The passages of an index; those of one shard where it is cut.

    Attributes:
        passages: None: not known.
        factory: FAISS factory string of the dense index.
    """

    passages: int | None
    factory: str

    def __str__(self) -> str:
        return f"{self.factory} over {self.passages:,} passages"


def describe_corpus(settings: Settings, passages: int | None = None) -> Corpus:
    """Passages and type from the manifest of the index if it is here, else from the settings.

    Args:
        passages: of the corpus, where its index is not here.

    Raises:
        UserError: the manifest is not that of an index.
    """
    retriever = settings.retriever
    manifest = read_manifest(retriever.index)
    if manifest is not None:
        return _read_corpus(retriever, manifest, passages)
    if passages is None:
        passages = _find_passages(settings)
    if retriever.shards and passages is not None:
        passages = -(-passages // len(retriever.shards))
    return Corpus(passages, retriever.faiss_factory)


def read_manifest(folder: Path | None) -> dict[str, Any] | None:
    """The manifest of an index; None: it is not here.

    Raises:
        UserError: the file is not JSON, or not a manifest.
    """
    if folder is None or not (folder / "manifest.json").is_file():
        return None
    try:
        content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/manifest.json is not JSON ({error}): build the index again") from None
    if isinstance(content, dict) and isinstance(content.get("manifest"), dict):
        content = content["manifest"]  # beside its digest
    if not isinstance(content, dict):
        raise _not_an_index(folder)
    return content


def _read_corpus(retriever: RetrieverSettings, manifest: dict[str, Any], passages: int | None) -> Corpus:
    assert retriever.index is not None
    dense = manifest.get("dense")
    try:
        factory = retriever.faiss_factory if dense is None else str(dense["factory"])
        return Corpus(passages or int(manifest["passages"]), factory)
    except (LookupError, TypeError, ValueError):
        raise _not_an_index(retriever.index) from None


def _not_an_index(folder: Path) -> UserError:
    return UserError(f"{folder}/manifest.json is not that of an index: build it again")


def _find_passages(settings: Settings) -> int | None:
    corpus, index = settings.data.corpus, settings.retriever.index
    if index is None and corpus.is_file() and corpus.suffix == ".jsonl" and corpus.stat().st_size <= _COUNTED_BYTES:
        with corpus.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    names = {part for path in (index, corpus) if path is not None for part in path.parts}
    return next((passages for name, passages in KNOWN.items() if any(part.startswith(name) for part in names)), None)
