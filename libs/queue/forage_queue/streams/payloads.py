"""Files beside a stream, for groups that are too large for Redis: the entry has a reference to one (a claim check).

- A file is written, durably and under a name of its own, before the script runs that writes the reference. So what a
  reference names is there. A call that is repeated refers to the file that it has written.
- The script that takes an entry off its stream returns the name, and its caller deletes the file. One that died in
  between, or before the reference was written, leaves an orphan: no entry names it. The trainer deletes those that are
  older than an hour, in which every call of `finish` has ended.
- A file that is gone or altered is as a damaged entry: the trainer rejects it, finds the group lost and issues it
  again. It is gone only where the place has its mark: an empty folder, whose volume is not mounted, says nothing.
- Writers use files only where they find in them what the trainer has announced: the mark of the place that they share.

The content is read from the reader's own place. A reference is nothing but a name within it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from forage_proto.v1.packed_pb2 import PackedGroup, StoredPart
from forage_runtime.errors import ForageError, UnavailableError
from forage_runtime.files import durable
from forage_runtime.files.remote import open_file_system
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.redaction import redact_url

FOLDER = "groups"
ORPHAN_S = 3600.0
"""Age from which a file that no entry names is of a writer that has given up."""
_SHARED = "shared"
_NAME = re.compile(r"[0-9a-f]{1,16}-[0-9a-f]{16}")
_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class PayloadLostError(ForageError):
    """The file of an entry is missing, or is not what was written."""


class Payloads:
    """The files of one run, in a folder for each stream."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            SettingsError: nothing installed reads `redis.payloads_url`.
        """
        self.inline_bytes = settings.redis.inline_bytes
        url = settings.redis.payloads_url
        self.where = redact_url(url) if url else str(settings.run.folder / FOLDER)
        self._store = _open(url, settings.run.id) if url else _Folder(settings.run.folder / FOLDER)
        self._known = self._offered = ""
        self._written: dict[str, StoredPart] = {}

    def offer(self) -> str:
        """Mark the place as this trainer's, once, and return the mark; empty where it cannot be written."""
        try:
            if not self._offered and not self._read_mark():
                self._store.write(_SHARED, os.urandom(8).hex().encode())
            # That of another trainer which started with this one, maybe.
            self._offered = self._offered or self._read_mark()
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            get_logger().warning("payloads_not_offered", place=self.where, detail=str(error))
        return self._offered

    def shares(self, mark: str) -> bool:
        """Whether this place is the one that a trainer has marked so."""
        if mark and mark != self._known:
            with contextlib.suppress(Exception):  # each file system has errors of its own
                self._known = self._read_mark()
        return bool(mark) and mark == self._known

    def holds(self, mark: str) -> bool:
        """Whether the files are here that were written while a trainer had this mark, or their loss is accepted: an
        empty file is in the place of the mark.

        Raises:
            UnavailableError: the place cannot be read now.
        """
        try:
            return self._store.read(_SHARED).decode() in ("", mark)
        except FileNotFoundError:
            return False
        except Exception as error:
            raise UnavailableError(f"{self.where} cannot be read ({error!r}): see redis.payloads_url") from error

    def put(self, stream: str, call: str, packed: PackedGroup) -> PackedGroup | None:
        """Write columns and texts of a group into a file; returns the group with a reference in their place.

        A repeated call refers to the file that is there. None where none can be written: the group goes through Redis.

        Args:
            call: 16 hexadecimal digits, of this group alone; `forget` tells that it is not repeated any more.
        """
        if not _STREAM.fullmatch(stream):  # a prompt names it
            return None
        stored = self._written.get(call)
        if stored is None or _measure_age_s(stored.name) > ORPHAN_S / 2:  # it must not become an orphan meanwhile
            data = PackedGroup(columns=packed.columns, texts=packed.texts).SerializeToString()
            name = f"{int(time.time() * 1000):x}-{call}"
            try:
                self._store.write(f"{stream}/{name}", data)
            except Exception as error:  # noqa: BLE001 - each file system has errors of its own
                get_logger().warning("payload_not_written", place=self.where, detail=str(error))
                return None
            stored = StoredPart(name=name, bytes=len(data), sha256=hashlib.sha256(data).digest())
            self._written[call] = stored
        return PackedGroup(head=packed.head, facts=packed.facts, stored=stored)

    def forget(self, call: str) -> None:
        """Forget the file of a call that is over."""
        self._written.pop(call, None)

    def fetch(self, stream: str, packed: PackedGroup) -> None:
        """Replace the reference of a group by what the file has.

        Raises:
            PayloadLostError: the file is missing, or has another content.
            UnavailableError: it cannot be read now, or the place is not the one that the trainer has marked.
            DecodeError: the reference is none.
        """
        stored = packed.stored
        if not _NAME.fullmatch(stored.name):
            raise DecodeError(f"a group refers to the file {stored.name[:40]!r}, which is no name of one")
        try:
            data = self._store.read(f"{stream}/{stored.name}")
        except FileNotFoundError as error:
            if self._is_marked():
                raise PayloadLostError(f"{self.where} has no {stream}/{stored.name}") from None
            raise UnavailableError(
                f"{self.where} lacks {stream}/{stored.name}, and the mark of the trainer's place ('{_SHARED}') too: is "
                "its volume mounted? See redis.payloads_url"
            ) from error
        except Exception as error:
            raise UnavailableError(
                f"{stream}/{stored.name} of {self.where} cannot be read ({type(error).__name__}: {error}): "
                "see redis.payloads_url"
            ) from error
        if len(data) != stored.bytes or hashlib.sha256(data).digest() != stored.sha256:
            raise PayloadLostError(f"{stream}/{stored.name} of {self.where} is not what was written")
        bulk = PackedGroup.FromString(data)
        packed.columns, packed.texts = bulk.columns, bulk.texts
        packed.ClearField("stored")

    def delete(self, stream: str, names: Iterable[str], is_closed: bool = False) -> None:
        """Delete files that no entry names any more; what cannot be deleted is left for `list_old`.

        Args:
            is_closed: the stream has ended, and its folder goes too.
        """
        for name in names:
            try:
                self._store.delete(f"{stream}/{name}")
            except FileNotFoundError:
                pass
            except Exception as error:  # noqa: BLE001 - each file system has errors of its own
                get_logger().warning("payload_not_deleted", place=self.where, name=name, detail=str(error))
        if is_closed:
            self._store.remove_empty(stream)

    def list_old(self) -> dict[str, set[str]]:
        """List the files that are older than `ORPHAN_S`, by stream; nothing where they cannot be listed now."""
        try:
            return {stream: old for stream in self._store.list("") if (old := self._list_old(stream))}
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            get_logger().warning("payloads_not_listed", place=self.where, detail=str(error))
            return {}

    def _list_old(self, stream: str) -> set[str]:
        names = self._store.list(stream)
        if not names:  # its trainer died before it could
            self._store.remove_empty(stream)
        return {name for name in names if _NAME.fullmatch(name) and _measure_age_s(name) > ORPHAN_S}

    def _read_mark(self) -> str:
        """Read the mark of the place; empty where it has none."""
        try:
            return self._store.read(_SHARED).decode()
        except FileNotFoundError:
            return ""

    def _is_marked(self) -> bool:
        try:
            mark = self._read_mark()
        except Exception:  # noqa: BLE001 - each file system has errors of its own
            return False
        return bool(mark) and mark == (self._offered or mark)


def _measure_age_s(name: str) -> float:
    return time.time() - int(name.partition("-")[0], 16) / 1000


class _PayloadStore(ABC):
    """Files by their path within a folder."""

    @abstractmethod
    def read(self, path: str) -> bytes: ...

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Add a file; it is whole and durable when this returns."""

    @abstractmethod
    def delete(self, path: str) -> None: ...

    @abstractmethod
    def remove_empty(self, folder: str) -> None:
        """Remove a folder, if there is one with nothing in it."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """Names in a folder; none where there is no such folder."""


class _Folder(_PayloadStore):
    """A folder that the services of a run share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        file = self._root / path
        if not file.parent.is_dir():
            file.parent.mkdir(parents=True, exist_ok=True)
            for parent in (file.parent, file.parent.parent):
                durable.sync(parent)
        partial = durable.name_partial(file)
        try:
            partial.write_bytes(data)
            durable.sync(partial)
            partial.replace(file)
            durable.sync(file.parent)
        finally:
            partial.unlink(missing_ok=True)

    def delete(self, path: str) -> None:
        (self._root / path).unlink()

    def remove_empty(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            (self._root / folder).rmdir()

    def list(self, folder: str) -> list[str]:
        try:
            files = list((self._root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        for file in files:
            if file.name.startswith(durable.PARTIAL_PREFIX) and durable.is_abandoned(file):
                file.unlink(missing_ok=True)
        return [file.name for file in files]


class _ObjectStore(_PayloadStore):
    """A folder in an object store, whose files appear whole."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root

    def read(self, path: str) -> bytes:
        return bytes(self._system.cat_file(f"{self._root}/{path}"))

    def write(self, path: str, data: bytes) -> None:
        self._system.pipe_file(f"{self._root}/{path}", data)

    def delete(self, path: str) -> None:
        self._system.rm_file(f"{self._root}/{path}")

    def remove_empty(self, folder: str) -> None:
        """A folder is part of a name here, and goes with its last file."""

    def list(self, folder: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]


def _open(url: str, run_id: str) -> _PayloadStore:
    from fsspec.implementations.local import LocalFileSystem  # in the environments of trainer and rollout service alone

    system, root = open_file_system(url, "redis.payloads_url", "the environments of trainer and rollout service")
    if isinstance(system, LocalFileSystem):
        return _Folder(Path(root) / run_id)
    return _ObjectStore(system, f"{root.rstrip('/')}/{run_id}")
