"""Copies an index from any address to a folder, and back: whole and checked, or not at all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from forage_retriever.index import manifest, space
from forage_retriever.index.download import (
    DownloadError,
    MissingFileError,
    RemoteFolder,
    check_address,
    download,
    open_file_system,
    open_folder,
)
from forage_retriever.index.manifest import MANIFEST_FILE, Manifest
from forage_retriever.index.progress import Report
from forage_retriever.index.workspace import Workspace, open_workspace
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.files import durable

_MANIFESTS = "manifests"
_MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_SHARDS = 4096
_STAGE = "fetching bytes"
_SEGMENT = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.=+-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def pull_index(url: str, final: Path, staging_dir: Path, report: Report, sha256: str = "") -> bool:
    """Copy the index, or all shards, at an address to the folder `final`; an interrupted copy goes on.

    Args:
        sha256: of `manifest.json`, which names the digest of every other file; of shards, of all manifests in order.

    Returns:
        False if `final` is there already.

    Raises:
        UserError: the address has no index, or files that differ from its manifest; or the disk is full.
    """
    if sha256 and not _SHA256.fullmatch(sha256):
        raise SettingsError(f"--sha256 is {sha256!r}: give 64 hexadecimal digits, as `sha256sum manifest.json` prints")
    folder = open_folder(url)
    if final.is_dir() and not any(final.iterdir()):
        final.rmdir()
    final.parent.mkdir(parents=True, exist_ok=True)
    with open_workspace(staging_dir, final, report) as workspace:
        if workspace is None:
            return False
        parts = _fetch_manifests(folder, url, workspace, sha256)
        _fetch_files(folder, parts, workspace, report)
        for part in parts:
            content = (workspace.folder / _MANIFESTS / part / MANIFEST_FILE).read_text(encoding="utf-8")
            durable.write_atomically(workspace.index / part / MANIFEST_FILE, content)
        durable.sync_tree(workspace.index)
        workspace.finish(final)
    return True


def push_index(folder: Path, url: str, report: Report) -> None:
    """Copy an index, or all shards, to an address of fsspec; the manifests last, so that it is never taken half.

    Raises:
        UserError: the folder is no index, or the address cannot be written.
    """
    check_address(url)
    if url.startswith(("http://", "https://", "hf://")) or "::" in url:
        raise SettingsError(f"{url} is not written: give a folder, s3:// or gs://; to the Hub with `hf upload`")
    parts = manifest.list_shards(folder) or [folder]
    files: dict[str, Path] = {}
    for part in parts:
        files |= {
            file.relative_to(folder).as_posix(): file for file in (part / n for n in manifest.read_manifest(part).files)
        }
    files |= {(part / MANIFEST_FILE).relative_to(folder).as_posix(): part / MANIFEST_FILE for part in parts}  # last
    total, done = sum(file.stat().st_size for file in files.values()), 0
    system, root = open_file_system(url)
    try:
        for name, file in files.items():
            path = f"{root.rstrip('/')}/{name}"
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.put_file(str(file), path)
            done += file.stat().st_size
            report("copying bytes", done, total)
    except Exception as error:
        # Every file system raises its own errors.
        raise DownloadError(
            f"{url} cannot be written ({type(error).__name__}: {error}): check the address and its credentials"
        ) from error


def _fetch_manifests(folder: RemoteFolder, url: str, workspace: Workspace, sha256: str) -> dict[str, Manifest]:
    """The manifests of the index by its folder: "." or one for each shard. Files of another index are removed."""
    kept = workspace.folder / _MANIFESTS
    before = _digest_files(kept)
    workspace.drop(_MANIFESTS)

    def fetch(part: str) -> Manifest:
        (kept / part).mkdir(parents=True)
        size = folder.describe(f"{part}/{MANIFEST_FILE}".removeprefix("./")).bytes
        if size is not None and size > _MAX_MANIFEST_BYTES:
            raise UserError(f"{url} has a manifest of {size} bytes, which no index has: check the address")
        file = kept / part / MANIFEST_FILE
        download(folder, f"{part}/{MANIFEST_FILE}".removeprefix("./"), file, size, limit=_MAX_MANIFEST_BYTES)
        return manifest.read_manifest(kept / part)

    try:
        parts = {".": fetch(".")}
    except MissingFileError:
        workspace.drop(_MANIFESTS)
        parts = _fetch_shards(url, fetch)
    for part, description in parts.items():
        _check_names(url if part == "." else f"{url}/{part}", description)
    contents = b"".join((kept / part / MANIFEST_FILE).read_bytes() for part in parts)
    if sha256 and (found := hashlib.sha256(contents).hexdigest()) != sha256:
        raise UserError(f"{url} has a manifest of SHA-256 {found}, and --sha256 is {sha256}: it is another index")
    if before and before != _digest_files(kept):
        workspace.drop(workspace.index.name)
        workspace.index.mkdir()
    return parts


def _fetch_shards(url: str, fetch: Callable[[str], Manifest]) -> dict[str, Manifest]:
    try:
        first = fetch("shard-0")
    except MissingFileError as error:
        raise UserError(
            f"{error}; nor has it shard-0: give the folder of an index that `forage index build` made"
        ) from None
    count = first.shard.of if first.shard is not None else 1
    if not 1 <= count <= _MAX_SHARDS:
        raise UserError(f"{url}/shard-0 says that it is one of {count} shards: its manifest is not to be trusted")
    return {"shard-0": first} | {f"shard-{number}": fetch(f"shard-{number}") for number in range(1, count)}


def _check_names(url: str, description: Manifest) -> None:
    """Check that a manifest names files below its own folder only, of sensible sizes and digests."""
    for name, entry in description.files.items():
        if not all(map(_SEGMENT.fullmatch, name.split("/"))) or name == MANIFEST_FILE:
            raise UserError(f"{url} names the file {ascii(name)[:200]}, which no index has: it is not to be trusted")
        if entry.bytes < 0 or not _SHA256.fullmatch(entry.sha256):
            raise UserError(
                f"{url} gives {name} {entry.bytes} bytes and the digest {ascii(entry.sha256)[:80]}: not to be trusted"
            )


def _fetch_files(folder: RemoteFolder, parts: dict[str, Manifest], workspace: Workspace, report: Report) -> None:
    total = sum(manifest.sum_bytes(part.files) for part in parts.values())
    space.check_disk(workspace.folder, total - space.measure_used_bytes(workspace.index), "the files of the index")
    done = 0

    def progress(read: int) -> None:
        nonlocal done
        done += read
        report(_STAGE, min(done, total), total)

    for part, name, file in _list_targets(parts, workspace.index):
        entry = parts[part].files[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        download(folder, f"{part}/{name}".removeprefix("./"), file, entry.bytes, entry.sha256, progress)


def _list_targets(parts: dict[str, Manifest], index: Path) -> Iterator[tuple[str, str, Path]]:
    for part, description in parts.items():
        for name in description.files:
            yield part, name, index / part / name


def _digest_files(folder: Path) -> dict[str, str]:
    """The digest of every file in a folder by its path there."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }
