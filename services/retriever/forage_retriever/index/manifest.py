"""What an index folder holds and was made from: `manifest.json`, written last, and the check of every file it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forage_common.errors import DataError, UserError
from forage_common.files import durable
from forage_common.settings import RetrievalMode
from forage_retriever.artifacts import digest_of

FORMAT = 1
"""Changes whenever a folder made by older code cannot be read."""

MANIFEST_FILE = "manifest.json"
CORPUS_FOLDER, BM25_FOLDER, DENSE_FOLDER = "corpus", "bm25", "dense"
CHECKED_BYTES = 4 * 2**30
"""What a start reads in full to check it (a few seconds); of files beyond it only the size is checked."""

_BLOCK = 2**20

Vectors = Literal["", "float16", "float32"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Part):
    """One file: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str


class EncoderEntry(_Part):
    """The encoder of the passages; `family` is that of encoders whose vectors may be mixed with these."""

    digest: str
    family: str
    model: str
    convention: str
    precision: str
    dimension: int


class Bm25Entry(_Part):
    """The word index, if there is one."""

    digest: str
    recipe: str


class DenseEntry(_Part):
    """The vector index, if there is one; `vectors` says how vectors are kept beside it, "" = not at all."""

    digest: str
    recipe: str
    factory: str
    vectors: Vectors


class ShardEntry(_Part):
    """Which part of a corpus this is: `number` of `of`, from 0; its first passage is row `first` of the whole."""

    number: int
    of: int
    first: int


class Manifest(_Part):
    """All that is known of an index.

    Attributes:
        recipe: digest of what was asked for, and of the file that it was asked of.
        corpus_digest: of the passages.
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
        """What the folder can be searched by."""
        both = self.bm25 is not None and self.dense is not None
        held = {RetrievalMode.BM25: self.bm25, RetrievalMode.DENSE: self.dense, RetrievalMode.HYBRID: both or None}
        return tuple(mode for mode in RetrievalMode if held[mode] is not None)

    def digest(self, mode: RetrievalMode) -> str:
        """What names this index when it is searched in a mode that it has."""
        digests = {
            RetrievalMode.BM25: self.bm25.digest if self.bm25 else "",
            RetrievalMode.DENSE: self.dense.digest if self.dense else "",
        }
        digests[RetrievalMode.HYBRID] = digest_of("hybrid/1", *digests.values())
        return digests[mode]


class DamagedError(DataError):
    """A file of an index is not what its manifest says."""


def read(folder: Path) -> Manifest:
    """The manifest of an index folder.

    Raises:
        UserError: there is none, it is damaged, or it was made for other code.
    """
    file = folder / MANIFEST_FILE
    try:
        content = file.read_bytes()
        if (format := _format(content)) != FORMAT:
            raise UserError(f"index {folder} is of format {format}, not {FORMAT}: build it again")
        kept = _Signed.model_validate_json(content)
    except OSError as error:
        reason = f"{folder} is no index ({MANIFEST_FILE}: {error.strerror})"
        shards = len(shard_folders(folder))
        remedy = (
            f"it holds {shards} shards, name one: {folder}/shard-0" if shards else "make one with `forage index build`"
        )
        raise UserError(f"{reason}: {remedy}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise DamagedError(f"{file} is damaged ({place}: {first['msg']}): build this index again") from None
    found = _digest(kept.manifest)
    if found != kept.sha256:
        raise DamagedError(f"{file} is damaged (digest {found}, not {kept.sha256}): build this index again")
    return kept.manifest


def write(folder: Path, manifest: Manifest) -> None:
    """Put the manifest into place, whole or not at all."""
    text = _Signed(sha256=_digest(manifest), manifest=manifest).model_dump_json(indent=1)
    durable.write_atomically(folder / MANIFEST_FILE, text + "\n")


def entries(folder: Path, progress: Callable[[int], None]) -> dict[str, FileEntry]:
    """Every file of a folder by its path there, but for the manifest and locks; `progress` is told bytes read."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=_sha256(path, progress))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_FILE and path.suffix != ".lock"
    }


def check(
    folder: Path, manifest: Manifest, progress: Callable[[int], None] = lambda read: None, limit: int = CHECKED_BYTES
) -> list[str]:
    """Check the files of an index against its manifest: the size of each, and the digests of the smallest that are
    `limit` bytes together. `progress` is told how many bytes were read since the last call.

    Returns:
        The files whose digests were not checked.

    Raises:
        DamagedError: names the file, the digest or size it has, and the one it should have.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size} bytes, not {entry.bytes}"
            raise DamagedError(f"index {folder} is damaged: {name} {found}: build it again")
    left, unchecked = limit, []
    for name, entry in sorted(manifest.files.items(), key=lambda item: item[1].bytes):
        left -= entry.bytes
        if left < 0:
            unchecked.append(name)
        elif (digest := _sha256(folder / name, progress)) != entry.sha256:
            raise DamagedError(
                f"index {folder} is damaged: {name} has the digest {digest}, not {entry.sha256}: build it again"
            )
    return unchecked


def shard_folders(folder: Path) -> list[Path]:
    """The shards in a folder that `forage index build --shards` made, in order."""
    numbers = (path.parent.name.removeprefix("shard-") for path in folder.glob(f"shard-*/{MANIFEST_FILE}"))
    return [folder / f"shard-{number}" for number in sorted(int(number) for number in numbers if number.isdigit())]


class _Signed(_Part):
    """The file: the manifest and its own digest."""

    sha256: str
    manifest: Manifest


def _format(content: bytes) -> int:
    """The format of a manifest of whatever format; this one's own where it cannot be told."""
    try:
        return int(json.loads(content)["manifest"]["format"])
    except (ValueError, TypeError, KeyError):
        return FORMAT


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def _sha256(path: Path, progress: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def total_bytes(files: Mapping[str, FileEntry]) -> int:
    """Of all files."""
    return sum(entry.bytes for entry in files.values())
