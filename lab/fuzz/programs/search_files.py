"""Corpora and index folders. In the environment of the retriever."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forage_retriever.corpus.read import read_passages
from forage_retriever.index.load import load_index
from forage_runtime.errors import DataError
from forage_runtime.settings import RetrieverSettings

REFUSALS: dict[str, tuple[type[Exception], ...]] = {}
_SETTINGS = {"mode": "bm25", "filter_fields": ["lang"]}
_ROWS = [
    {"id": f"p{n}", "contents": f'"{title}"\n{title} is a place.', "lang": language}
    for n, (title, language) in enumerate((("Norway", "nb"), ("Oslo", "nb"), ("Kandy", "si"), ("São Paulo", "pt")))
]


def list_good_files(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(reader, name, content) of good files."""
    corpus = "".join(json.dumps(row) + "\n" for row in _ROWS).encode()
    yield "corpus", "corpus.jsonl", corpus
    yield "corpus", "corpus.jsonl.gz", gzip.compress(corpus, mtime=0)
    index = _build_index(folder)
    for number, file in enumerate(_list_index(index)):
        yield "index", f"{number}{file.suffix}", file.read_bytes()
        if file.name == "manifest.json":
            yield "index", f"{number}{file.suffix}", file.read_bytes()


def make_readers(folder: Path) -> dict[str, Callable[[Path, str], Any]]:
    """The readers by name. Each takes the path of a file, and its name; those of an index have its number there."""
    folder.mkdir(parents=True)
    index = _build_index(folder)
    files = _list_index(index)
    settings = RetrieverSettings(**_SETTINGS, index=index)  # type: ignore[arg-type]

    def read_corpus(file: Path, name: str) -> None:
        for _ in read_passages(file):
            pass

    def read_index(file: Path, name: str) -> None:
        target = files[int(name.partition(".")[0])]
        kept = {one: one.read_bytes() for one in {target, index / "manifest.json"}}
        # As another file of that name: what an earlier search has mapped into memory must not become shorter.
        target.unlink()
        try:
            shutil.copyfile(file, target)
            loaded = load_index(Path("none"), settings, lambda what: None)
            loaded.searcher.search(["Oslo"], 3)
        finally:
            for one, content in kept.items():
                one.unlink(missing_ok=True)
                one.write_bytes(content)

    return {"corpus": read_corpus, "index": read_index}


def _build_index(folder: Path) -> Path:
    """The index of a small corpus, as a first start of the service builds it."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
    settings = RetrieverSettings(**_SETTINGS, cache_dir=folder / "cache")  # type: ignore[arg-type]
    load_index(corpus, settings, lambda what: None)
    manifests = sorted((folder / "cache").rglob("manifest.json"))
    if not manifests:
        raise DataError(f"no index was built in {folder / 'cache'}: {hashlib.sha256(corpus.read_bytes()).hexdigest()}")
    return manifests[0].parent


def _list_index(index: Path) -> list[Path]:
    """The files of an index, in an order that the random names of segments do not change."""
    files = [file for file in index.rglob("*") if file.is_file() and file.suffix != ".lock"]
    return sorted(files, key=lambda file: (file.parent.name, file.suffix, file.stat().st_size))
