"""Search-R1's corpus: Wikipedia of December 2018 in 21 million passages, and the FAISS file over it.

The files are PeterJinGo's on the Hugging Face Hub, as Search-R1's own instructions name them. Their digests are not
known in advance: the Hub's are checked where it gives them, and those of the first time are kept and asked for later.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from forage_retriever.index import space
from forage_retriever.index.download import DownloadError, download, open_folder
from forage_retriever.index.progress import Report
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.files import durable

CORPUS_URL = "hf://datasets/PeterJinGo/wiki-18-corpus"
PACKED_FILE = "wiki-18.jsonl.gz"
CORPUS_FILE = "corpus.jsonl"
INDEXES = {"e5-flat": ("hf://datasets/PeterJinGo/wiki-18-e5-index", ("part_aa", "part_ab"), "e5_Flat.index")}
"""By name: where it is, the parts that are joined, and the file that they become."""

KEPT_FILE = "sources.json"
_UNPACKED = 4
"""Bytes of text per byte of gzip, estimated: of room that is asked for before."""

_MAX_UNPACKED = 12
"""… and at most, of English text."""

_BLOCK = 2**22
_DIGEST = re.compile(r"[0-9a-f]{64}")


def fetch_wiki18(out: Path, index: str, pinned: Sequence[str], report: Report, source: str = "") -> list[str]:
    """Write `corpus.jsonl` and, if asked for, the FAISS file to a folder; an interrupted download goes on.

    Args:
        index: a key of `INDEXES`, or empty.
        pinned: FILE=DIGEST, SHA-256 digests of the Hub's files.
        source: address of a folder with the Hub's files; empty: the Hub.

    Returns:
        What was done and what to do next, as sentences.

    Raises:
        UserError: an option is wrong, a download failed or gave another file, or the disk is full.
    """
    if index and index not in INDEXES:
        raise SettingsError(f"--index is {index!r}: give {', '.join(INDEXES)}, or build one with `forage index build`")
    out.mkdir(parents=True, exist_ok=True)
    sources = _Sources(out / KEPT_FILE, _parse_pinned(pinned, index))
    corpus = out / CORPUS_FILE
    if not corpus.exists():
        packed = out / PACKED_FILE
        sources.fetch(source or CORPUS_URL, PACKED_FILE, packed, report)
        _unpack(packed, corpus, report)
        packed.unlink()
    sentences = [
        f"{corpus}: {corpus.stat().st_size:,} bytes; {PACKED_FILE} had the SHA-256 {sources.known(PACKED_FILE)}"
    ]
    if not index:
        build = f"forage index build indexes/wiki-18 --corpus {corpus} --faiss-factory IVF16384,SQ8"
        return [*sentences, f"next: {build} retriever.encoder.model=models/e5-base-v2"]
    url, parts, name = INDEXES[index]
    if not (out / name).exists():
        for part in parts:
            sources.fetch(source or url, part, out / part, report)
        _join([out / part for part in parts], out / name, report)
    for part in parts:
        (out / part).unlink(missing_ok=True)
    sentences.append(f"{out / name}: {(out / name).stat().st_size:,} bytes")
    adopt = f"forage index convert indexes/wiki-18-flat --faiss {out / name} --corpus {corpus}"
    return [
        *sentences,
        f"next: {adopt} retriever.encoder.model=models/e5-base-v2",
        "then: forage index convert indexes/wiki-18-flat indexes/wiki-18 --faiss-factory IVF16384,SQ8",
    ]


class _Sources:
    """The digests of the Hub's files: those that the user gives, else those of the first time."""

    def __init__(self, file: Path, pinned: dict[str, str]) -> None:
        self._file = file
        self._pinned = pinned
        try:
            self._kept = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read ({error}): delete it, and the files that it is about") from None
        for name, digest in pinned.items():
            if (before := self.known(name)) not in ("", digest):
                raise DataError(f"--sha256 of {name} is {digest}, and {file} has {before} of it: delete {file.parent}")

    def known(self, name: str) -> str:
        """The digest that a file had before; "" if there was none."""
        return str(self._kept.get(name, {}).get("sha256", ""))

    def fetch(self, url: str, name: str, target: Path, report: Report) -> None:
        """Download a file, check it, and keep its digest."""
        before = self._kept.get(name, {}).get("bytes")
        if before is not None and target.exists() and target.stat().st_size > before:
            os.truncate(target, before)  # others were being joined to it
        folder, stage = open_folder(url), f"fetching {name}, bytes"
        remote = folder.describe(name)
        if remote.bytes is not None:
            have = target.stat().st_size if target.exists() else 0
            space.check_disk(target.parent, remote.bytes - have, name)
        wanted = self._pinned.get(name) or self.known(name)
        if wanted and remote.sha256 and wanted != remote.sha256:
            raise DownloadError(
                f"{url}/{name} has the SHA-256 {remote.sha256}, expected {wanted}: it was changed there"
            )
        done = 0

        def progress(read: int) -> None:
            nonlocal done
            done += read
            report(stage, done, remote.bytes)

        digest = download(folder, name, target, remote.bytes, wanted or remote.sha256, progress)
        self._kept[name] = {"url": f"{url}/{name}", "bytes": target.stat().st_size, "sha256": digest}
        durable.write_atomically(self._file, json.dumps(self._kept, indent=1) + "\n")


def _parse_pinned(pinned: Sequence[str], index: str) -> dict[str, str]:
    names = [PACKED_FILE, *(INDEXES[index][1] if index else ())]
    digests = {}
    for text in pinned:
        name, _, digest = text.partition("=")
        if name not in names or not _DIGEST.fullmatch(digest):
            raise SettingsError(
                f"--sha256 is {text!r}: give FILE=DIGEST with 64 hexadecimal digits, of {', '.join(names)}"
            )
        digests[name] = digest
    return digests


def _unpack(packed: Path, corpus: Path, report: Report) -> None:
    size, done = packed.stat().st_size, 0
    space.check_disk(corpus.parent, size * _UNPACKED, "the unpacked passages")
    try:
        with (
            durable.stage_file(corpus) as partial,
            packed.open("rb") as raw,
            gzip.open(raw) as lines,
            partial.open("wb") as out,
        ):
            while block := lines.read(_BLOCK):
                done += len(block)
                if done > size * _MAX_UNPACKED + _BLOCK:
                    raise DataError(f"{packed} unpacks to more than {_MAX_UNPACKED} times its size: it is no text")
                out.write(block)
                report(f"unpacking bytes of {PACKED_FILE}", raw.tell(), size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{packed} is not gzip, or damaged ({error}): delete it, and run the same command again"
        ) from None


def _join(parts: Sequence[Path], target: Path, report: Report) -> None:
    """Append the parts to the first, which becomes the target; killed in between, the same is done again."""
    first, *rest = parts
    begin = json.loads((first.parent / KEPT_FILE).read_text(encoding="utf-8"))[first.name]["bytes"]
    space.check_disk(target.parent, sum(part.stat().st_size for part in rest), target.name)
    total, done = begin + sum(part.stat().st_size for part in rest), begin
    with durable.detect_full_disk(target), first.open("r+b") as out:
        out.truncate(begin)
        out.seek(begin)
        for part in rest:
            with part.open("rb") as read:
                while block := read.read(_BLOCK):
                    out.write(block)
                    done += len(block)
                    report(f"joining {target.name}, bytes", done, total)
    durable.sync(first)
    first.rename(target)
    durable.sync(target.parent)
