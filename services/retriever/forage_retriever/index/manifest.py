"""The manifest of an index folder: `manifest.json`, written last, and the check of every file that it names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forage_retriever.artifacts import compute_digest, hash_files
from forage_retriever.encoders.encoder import Encoder
from forage_runtime.errors import DataError, UserError
from forage_runtime.files import durable
from forage_runtime.files.lucene import explain_lucene
from forage_runtime.settings import RetrievalMode

FORMAT = 1
"""Changes whenever a folder written by older code cannot be read."""

MANIFEST_FILE = "manifest.json"
CORPUS_FOLDER, BM25_FOLDER, DENSE_FOLDER = "corpus", "bm25", "dense"
CHECKED_BYTES = 4 * 2**30
"""Bytes whose digests are checked at start (a few seconds); beyond it only sizes are checked."""

_LIBRARIES = ("forage-retriever", "numpy", "faiss-cpu", "faiss-gpu", "tantivy", "onnxruntime", "tokenizers", "torch")

Vectors = Literal["", "float16", "float32"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Part):
    """One file: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str


class EncoderEntry(_Part):
    """The encoder of the passages; `family` names the encoders whose vectors may be mixed with these."""

    digest: str
    family: str
    model: str
    convention: str
    precision: str
    dimension: int

    @classmethod
    def from_encoder(cls, encoder: Encoder) -> EncoderEntry:
        return cls(
            digest=encoder.digest,
            family=encoder.family,
            model=encoder.model,
            convention=encoder.convention.name,
            precision=encoder.precision,
            dimension=encoder.dimension,
        )


class Bm25Entry(_Part):
    """The BM25 index, if there is one."""

    digest: str
    recipe: str


class DenseEntry(_Part):
    """The vector index, if there is one; `vectors` is the precision of the vectors stored beside it, "" = none."""

    digest: str
    recipe: str
    factory: str
    vectors: Vectors


class ShardEntry(_Part):
    """The part of a corpus: `number` of `of`, from 0; its first passage is row `first` of the whole."""

    number: int
    of: int
    first: int


class Manifest(_Part):
    """The content and origin of an index.

    Attributes:
        recipe: digest of the recipe and of the corpus file.
        corpus_digest: SHA-256 of the passages.
        files: by path in the folder.
        made_with: versions by library.
    """

    format: int
    recipe: str
    passages: int
    corpus_digest: str
    corpus_bytes: int
    filter_fields: tuple[str, ...]
    bm25: Bm25Entry | None
    encoder: EncoderEntry | None
    dense: DenseEntry | None
    shard: ShardEntry | None
    made_with: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def modes(self) -> tuple[RetrievalMode, ...]:
        """The modes that the folder can be searched in."""
        has = {RetrievalMode.BM25: self.bm25 is not None, RetrievalMode.DENSE: self.dense is not None}
        has[RetrievalMode.HYBRID] = all(has.values())
        return tuple(mode for mode in RetrievalMode if has[mode])

    def compute_digest(self, mode: RetrievalMode) -> str:
        """The SHA-256 that names this index when it is searched in a mode that it has."""
        digests = {
            RetrievalMode.BM25: self.bm25.digest if self.bm25 else "",
            RetrievalMode.DENSE: self.dense.digest if self.dense else "",
        }
        digests[RetrievalMode.HYBRID] = compute_digest("hybrid/1", *digests.values())
        return digests[mode]


class DamagedError(DataError):
    """A file of an index is not what its manifest says."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an index folder.

    Raises:
        UserError: there is none, it is damaged, or its format is another.
    """
    file = folder / MANIFEST_FILE
    try:
        text = file.read_bytes()
        if (format := _read_format(text)) != FORMAT:
            raise UserError(f"index {folder} is of format {format}, not {FORMAT}: build it again")
        content = _DigestedManifest.model_validate_json(text)
    except OSError as error:
        if lucene := explain_lucene(folder):
            raise UserError(lucene) from None
        reason = f"{folder} is not an index ({MANIFEST_FILE}: {error.strerror})"
        shards = len(list_shards(folder))
        remedy = (
            f"it holds {shards} shards, name one: {folder}/shard-0" if shards else "make one with `forage index build`"
        )
        raise UserError(f"{reason}: {remedy}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise DamagedError(f"{file} is damaged ({place}: {first['msg']}): build this index again") from None
    digest = _compute_digest(content.manifest)
    if digest != content.sha256:
        raise DamagedError(f"{file} is damaged (digest {digest}, not {content.sha256}): build this index again")
    return content.manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically."""
    text = _DigestedManifest(sha256=_compute_digest(manifest), manifest=manifest).model_dump_json(indent=1)
    durable.write_atomically(folder / MANIFEST_FILE, text + "\n")


def list_files(folder: Path, progress: Callable[[int], None]) -> dict[str, FileEntry]:
    """Every file of a folder by its path there, except the manifest and locks; `progress` gets the bytes read."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=hash_files([path], progress))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_FILE and path.suffix != ".lock"
    }


def check_files(
    folder: Path, manifest: Manifest, progress: Callable[[int], None] = lambda read: None, limit: int = CHECKED_BYTES
) -> list[str]:
    """Check the files of an index against its manifest: the size of each, and the digests of the smallest that are
    `limit` bytes together. `progress` gets the bytes read since its last call.

    Returns:
        The files whose digests were not checked.

    Raises:
        DamagedError: a file is missing or differs; names it and both digests or sizes.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            problem = "is missing" if size is None else f"has {size} bytes, not {entry.bytes}"
            raise DamagedError(f"index {folder} is damaged: {name} {problem}: build it again")
    remaining, unchecked = limit, []
    for name, entry in sorted(manifest.files.items(), key=lambda item: item[1].bytes):
        remaining -= entry.bytes
        if remaining < 0:
            unchecked.append(name)
        elif (digest := hash_files([folder / name], progress)) != entry.sha256:
            raise DamagedError(
                f"index {folder} is damaged: {name} has the digest {digest}, not {entry.sha256}: build it again"
            )
    return unchecked


def sum_bytes(files: Mapping[str, FileEntry]) -> int:
    """The size of all files together."""
    return sum(entry.bytes for entry in files.values())


def list_versions() -> dict[str, str]:
    """The versions of Python and of the libraries that decide an index."""
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return versions


def list_shards(folder: Path) -> list[Path]:
    """The shards in a folder that `forage index build --shards` built, in order."""
    numbers = (path.parent.name.removeprefix("shard-") for path in folder.glob(f"shard-*/{MANIFEST_FILE}"))
    return [folder / f"shard-{number}" for number in sorted(int(number) for number in numbers if number.isdigit())]


class _DigestedManifest(_Part):
    """The content of the file: the manifest and its own digest."""

    sha256: str
    manifest: Manifest


def _read_format(content: bytes) -> int:
    """The format of a manifest of any format; `FORMAT` where it cannot be read."""
    try:
        return int(json.loads(content)["manifest"]["format"])
    except (ValueError, TypeError, KeyError, RecursionError):  # the last: of a file nested thousands deep
        return FORMAT


def _compute_digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
