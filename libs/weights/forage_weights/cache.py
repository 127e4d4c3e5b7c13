"""Copies of policies on this machine, shared by its engines: fetched once, patched in place by deltas, verified.

A folder of the cache is named by the content of the policy in it and has that name only while it is complete. Locks
(`flock`) end with their process, however it ends:

- `.lock` of the cache: held by the one process that changes it. What it finds unfinished is garbage of a dead one.
- `.lock` of a folder: shared by readers; alone for the process that patches or removes it. It moves with the folder.

What is trusted: the marker of a folder says that its files had the announced digests, and which inodes, sizes and times
they had. Whoever can change a file without a trace of that can also change this process. It does not outlive the boot:
after a power cut the disk may have the marker and not the data. Without a matching marker the files are hashed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_runtime.errors import DiskFullError, ForageError
from forage_runtime.files.durable import PARTIAL_PREFIX, detect_full_disk
from forage_runtime.files.remote import StorageError
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_weights.announcement import (
    READERS,
    PolicyError,
    PolicyFolder,
    describe_policy,
    list_files,
    list_parts,
    verify_files,
)
from forage_weights.delta import DeltaError, patch_files, read_delta
from forage_weights.parallel import map_parallel
from forage_weights.storage import find_local_folder, get_file
from forage_weights.tensors import SUFFIX

log = get_logger()
MAX_KEPT = 3
"""Policies that stay in the cache: the last ones that were used."""
WORK_LIMIT_S = 1800.0
READERS_LIMIT_S = 600.0
"""Longer than a trajectory: in drain mode an engine holds a policy until those that run have ended."""
_LOCK, _MARKER, _DELTAS = ".lock", ".verified", "deltas"
_OWN = re.compile(rf"(?:{re.escape(PARTIAL_PREFIX)})?[0-9a-f]{{64}}|{re.escape(PARTIAL_PREFIX)}{_DELTAS}")
"""Names of what a cache may remove: its folder may be one that has other things in it, too."""
_POLL_S = 0.02
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Receive = Callable[[Policy, Sequence[PolicyFile], Path], None]


@dataclass(frozen=True)
class CachedDelta:
    """The delta of one version, in files that `forage_weights.delta` reads.

    Attributes:
        base: `compute_content` of the policy that it applies to.
        content: the same of the policy that results.
    """

    base: str
    content: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class CachedPolicy:
    """A verified policy on this machine, which stays as it is while it is held.

    Attributes:
        content: `compute_content` of its files.
        files: all files of the whole policy, in the order announced.
        deltas: those that lead to it, as far back as they are on this machine; the last one results in `content`.
    """

    content: str
    files: list[Path]
    deltas: tuple[CachedDelta, ...] = ()


class PolicyCache:
    """Makes announced policies present on this machine. Engines of a machine share a folder.

    Args:
        folder: on a disk of this machine.
        work_limit_s: longest wait for another process that fetches or patches.
        readers_limit_s: longest wait for engines that still read a policy which is to be patched.
        receive: another way than storage to files of a policy, `receive(policy, files, folder)`, tried first where the
            announcement names a direct sender; it raises a `ForageError` if it fails.
        offer: told each policy that is held, and its files, which lose their names before they are patched.
        check: called with each policy before anything of it is read; raises `PolicyError` where it may not be.
        copies_all: also policies that are whole and on this machine, for who must load the bytes that were verified.

    Attributes:
        received: folders whose files came that other way.
        fallbacks: folders whose files should have, and were read from storage.
    """

    def __init__(
        self,
        folder: Path,
        work_limit_s: float = WORK_LIMIT_S,
        readers_limit_s: float = READERS_LIMIT_S,
        receive: Receive | None = None,
        offer: Callable[[Policy, CachedPolicy], None] | None = None,
        check: Callable[[Policy], None] = lambda policy: None,
        copies_all: bool = False,
    ) -> None:
        self.received = self.fallbacks = 0
        self._folder = folder
        self._receive, self._offer, self._check, self._copies_all = receive, offer, check, copies_all
        self._work_limit_s = work_limit_s
        self._readers_limit_s = readers_limit_s

    @contextmanager
    def hold(self, policy: Policy) -> Iterator[CachedPolicy]:
        """Hold the verified files of a policy: its own where they are whole and on this machine, else copies.

        Its copies may be patched as soon as nobody holds them, so whoever maps them does that within the block, and
        holds no policy while asking for the next one.

        Raises:
            PolicyError: it may not be read, its files cannot be fetched, or differ from the announcement; or there is
                no room for them.
        """
        parts = list_parts(policy)
        self._check(policy)
        with contextlib.ExitStack() as stack:
            try:
                is_sent = self._receive is not None and policy.HasField("direct")
                is_copied = self._copies_all or is_sent or len(parts) > 1
                local = None if is_copied else find_local_folder(policy.uri)
                if local is not None:
                    # Whoever wrote that folder may write to it again, so each reader hashes it.
                    held = CachedPolicy(parts[-1].content, verify_files(policy, local))
                else:
                    held = stack.enter_context(self._hold_copy(policy, parts))
            except (StorageError, DiskFullError, DeltaError) as error:
                raise PolicyError(f"{describe_policy(policy)} cannot be fetched: {error}") from error
            except OSError as error:
                raise PolicyError(f"{describe_policy(policy)} cannot be kept in {self._folder}: {error}") from error
            yield held

    @contextmanager
    def _hold_copy(self, policy: Policy, parts: Sequence[PolicyFolder]) -> Iterator[CachedPolicy]:
        folder = self._name(parts[-1])
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            handle = self._share(policy, folder)
            if handle is not None:
                stack.callback(os.close, handle)
            else:
                with self._work(policy), detect_full_disk(folder):
                    # Meanwhile another process may have made it.
                    handle = self._share(policy, folder)
                    if handle is None:
                        handle = self._make(policy, parts, folder)
                    stack.callback(os.close, handle)
                    self._prune(MAX_KEPT)
            os.utime(folder)
            files = [folder / name for name in list_files(policy)]
            held = CachedPolicy(parts[-1].content, files, _list_deltas(folder, parts))
            if self._offer is not None:
                self._offer(policy, held)
            yield held

    def _name(self, part: PolicyFolder) -> Path:
        return self._folder / part.content.rpartition(":")[2]

    def _share(self, policy: Policy, folder: Path) -> int | None:
        """A shared lock of the folder of a verified policy; None if it is absent, damaged, or being changed."""
        handle = _lock(folder, fcntl.LOCK_SH)
        if handle is None or _is_trusted(folder):
            return handle
        try:
            _verify(policy, folder)
            return handle
        except BaseException as error:
            os.close(handle)
            if not isinstance(error, PolicyError):
                raise
            log.warning("policy_copy_damaged", detail=str(error))
            return None

    @contextmanager
    def _work(self, policy: Policy) -> Iterator[None]:
        """Be the only process that changes the cache; what dead ones left unfinished is removed."""
        handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _wait_for_lock(handle, policy, "another engine's copy of a policy", self._work_limit_s)
            self._remove_unfinished()
            try:
                yield
            finally:
                self._remove_unfinished()
        finally:
            os.close(handle)

    def _remove_unfinished(self) -> None:
        for leftover in self._folder.glob(f"{PARTIAL_PREFIX}*"):
            if _OWN.fullmatch(leftover.name):
                shutil.rmtree(leftover)

    def _make(self, policy: Policy, parts: Sequence[PolicyFolder], folder: Path) -> int:
        """Make the folder of a policy; a shared lock of it."""
        if folder.is_dir():
            os.close(self._take(policy, folder, self._partial(folder)))
            shutil.rmtree(self._partial(folder))
        here = [number for number, part in enumerate(parts[:-1]) if self._name(part).is_dir()]
        if here:
            try:
                return self._patch(policy, parts[here[-1] :], folder, fetch=False)
            except (DeltaError, _AlteredError) as error:
                # What was patched may have been damaged since it was verified.
                log.warning("policy_base_damaged", detail=str(error))
        self._prune(MAX_KEPT - 1)
        try:
            return self._patch(policy, parts, folder, fetch=True)
        except DiskFullError as error:
            # No delta that comes applies to the copies that nobody reads now.
            log.warning("policy_cache_full", detail=str(error))
            self._remove_unfinished()
            self._prune(0)
            return self._patch(policy, parts, folder, fetch=True)

    def _fetch(self, policy: Policy, part: PolicyFolder, target: Path) -> None:
        """Copy the files of a part into a new folder, several at once; their digests are verified."""
        target.mkdir(parents=True)
        if self._receive is not None and policy.HasField("direct"):
            try:
                self._receive(policy, list(part.files.values()), target)
                verify_files(policy, target, part.files)
                self.received += 1
                return
            except ForageError as error:
                self.fallbacks += 1
                log.warning("policy_not_received", detail=str(error))
                shutil.rmtree(target)
                target.mkdir()
        map_parallel(
            lambda file: get_file(part.uri, file.name, target / file.name, file.bytes), part.files.values(), READERS
        )
        verify_files(policy, target, part.files)

    def _patch(self, policy: Policy, parts: Sequence[PolicyFolder], folder: Path, fetch: bool) -> int:
        """Make the folder of a policy out of its first part, which is fetched or here, and the deltas after it."""
        stage, deltas = self._partial(folder), self._folder / f"{PARTIAL_PREFIX}{_DELTAS}"
        # All deltas are here and verified before the base is touched.
        for base, part in pairwise(parts):
            target = deltas / _name_delta(base, part)
            if target.exists():  # the same step again, as at a learning rate of 0
                continue
            self._fetch(policy, part, target)
            for name in part.files:
                delta = read_delta(target / name)
                if (delta.base or base.content, delta.content or part.content) != (base.content, part.content):
                    raise PolicyError(f"{describe_policy(policy)}: {part.uri}/{name} is the delta of other versions")
        if fetch:
            self._fetch(policy, parts[0], stage)
            handle = _lock(stage, fcntl.LOCK_EX)
            assert handle is not None
        else:
            handle = self._take(policy, self._name(parts[0]), stage)
        try:
            weights = [stage / name for name in list_files(policy) if name.endswith(SUFFIX)]
            for base, part in pairwise(parts):
                target = stage / _DELTAS / _name_delta(base, part)
                if (deltas / target.name).exists():
                    target.parent.mkdir(exist_ok=True)
                    shutil.rmtree(target, ignore_errors=True)
                    (deltas / target.name).rename(target)
                for name in part.files:
                    patch_files(target / name, weights)
            _verify(policy, stage)
            stage.rename(folder)
            fcntl.flock(handle, fcntl.LOCK_SH)
            return handle
        except BaseException:
            os.close(handle)
            shutil.rmtree(stage, ignore_errors=True)
            raise

    def _take(self, policy: Policy, folder: Path, stage: Path) -> int:
        """Rename a folder that nobody reads any more, so that it is no policy of the cache; its lock."""
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _wait_for_lock(handle, policy, "engines that read the policy before", self._readers_limit_s)
            folder.rename(stage)
            (stage / _MARKER).unlink(missing_ok=True)
            return handle
        except BaseException:
            os.close(handle)
            raise

    def _partial(self, folder: Path) -> Path:
        return folder.with_name(f"{PARTIAL_PREFIX}{folder.name}")

    def _prune(self, kept: int) -> None:
        """Remove all but the policies used last, and those that are in use."""
        folders = [entry for entry in self._folder.iterdir() if _OWN.fullmatch(entry.name) and entry.name[0] != "."]
        for old in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)[kept:]:
            handle = _lock(old, fcntl.LOCK_EX)
            if handle is not None:
                try:
                    old.rename(self._partial(old))
                finally:
                    os.close(handle)
                shutil.rmtree(self._partial(old), ignore_errors=True)


class _AlteredError(PolicyError):
    """Files do not have the announced digests."""


def _verify(policy: Policy, folder: Path) -> None:
    seen = _describe_files(folder)  # before the digests: what is written meanwhile does not match the marker
    try:
        verify_files(policy, folder)
    except PolicyError as error:
        raise _AlteredError(str(error)) from error
    # It only saves time, so a full disk is no reason to fail.
    with contextlib.suppress(OSError):
        marker = folder / f"{_MARKER}-{os.getpid()}-{threading.get_ident()}"
        marker.write_text(json.dumps({"boot": _BOOT.read_text(encoding="utf-8"), "files": seen}), encoding="utf-8")
        marker.replace(folder / _MARKER)


def _is_trusted(folder: Path) -> bool:
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return bool(marker == {"boot": _BOOT.read_text(encoding="utf-8"), "files": _describe_files(folder)})
    except (OSError, ValueError):
        return False


def _describe_files(folder: Path) -> dict[str, list[int]]:
    """What changes when a file of the folder is written, replaced, added or removed."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    stats = {str(name): path.stat() for name, path in files.items() if not name.name.startswith((_LOCK, _MARKER))}
    return {name: [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()}


def _name_delta(base: PolicyFolder, part: PolicyFolder) -> str:
    return f"{base.content.rpartition(':')[2]}-{part.content.rpartition(':')[2]}"


def _list_deltas(folder: Path, parts: Sequence[PolicyFolder]) -> tuple[CachedDelta, ...]:
    """The deltas at the end of a chain that are in the folder of its policy."""
    found: list[CachedDelta] = []
    for base, part in reversed(list(pairwise(parts))):
        delta = folder / _DELTAS / _name_delta(base, part)
        files = tuple(delta / name for name in part.files)
        if all(file.is_file() for file in files):
            found.append(CachedDelta(base.content, part.content, files))
        elif base.content != part.content:
            break
    return tuple(reversed(found))


def _lock(folder: Path, kind: int) -> int | None:
    """A lock of a folder, if it exists and no other process has one against it."""
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        # It may have been renamed before it was locked.
        if os.path.samestat(os.fstat(handle), os.stat(folder / _LOCK)):
            return handle
    os.close(handle)
    return None


def _wait_for_lock(handle: int, policy: Policy, what: str, limit_s: float) -> None:
    began = time.monotonic()
    with waiting(what, on="rollout", limit_s=limit_s, detail=describe_policy(policy)):
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() - began > limit_s:
                raise PolicyError(
                    f"{describe_policy(policy)} waited {limit_s:g} s for {what}: look for an engine of this machine "
                    "that hangs"
                )
            time.sleep(_POLL_S)  # wait: named by the caller
