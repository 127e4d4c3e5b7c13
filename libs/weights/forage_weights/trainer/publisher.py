"""Publication of policies: complete folders with digests, announced under the trainer's epoch.

A folder holds a whole policy, or the delta of one step: what has changed since the version before. Replicas learn of a
version only by the announcement, which comes after its folder is durable and complete under its final name, so none can
load a part of it. Redis refuses the announcement of a trainer with an older epoch. Folders lie in the run's folder, and
where `trainer.publish.uri` says, copies for the engines (`PolicyStore`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import Counter, Gauge

from forage_proto.v1.trajectory_pb2 import Canary, Policy, PolicyFile, PolicyPart
from forage_queue.streams.client import LIVELY_S, StreamClient
from forage_runtime.errors import DataError, UserError
from forage_runtime.files.folders import remove_folder, remove_leftovers, stage_folder
from forage_runtime.files.remote import StorageError, open_file_system
from forage_runtime.retries import Retries, StorageRetry
from forage_runtime.security.audit import record_act
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import PublishSettings, SecuritySettings, Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_weights.announcement import sign_announcement
from forage_weights.delta import encode_delta
from forage_weights.digests import compute_content, compute_digest, verify_digest
from forage_weights.direct_sender import DirectSender
from forage_weights.folders import (
    describe_folder,
    list_needed,
    name_folder,
    name_whole,
    parse_name,
    write_description,
)
from forage_weights.signed_folder import sign_folder
from forage_weights.storage import (
    StorageRefusedError,
    delete_folder,
    find_local_folder,
    list_folders,
    list_sizes,
    probe_folder,
    put_files,
)
from forage_weights.trainer.model_files import (
    Adapter,
    WeightsFile,
    digest_model_files,
    write_adapter_folder,
    write_model_folder,
)
from forage_weights.trainer.sender_address import open_sender

KEEP_NEWEST = 3
"""Newest versions that always stay: a replica may be loading one that it has not acknowledged yet."""
DENSE = 4
"""A delta of more than this part of the whole policy is not worth its coding: the policy is published whole."""
DELTA = "policy.delta"
PUBLISHED = Counter("forage_trainer_policies_published_total", "Policy versions announced")
DELTAS = Counter("forage_trainer_deltas_published_total", "Policy versions that were published as a delta")
BYTES = Gauge("forage_trainer_publish_bytes", "Bytes of the last published policy: of its delta, or of all its weights")
SECONDS = Gauge("forage_trainer_publish_seconds", "Seconds to write and announce the last policy")


@dataclass(frozen=True)
class _Base:
    """What was announced last, and its elements as unsigned integers: what the next delta is relative to."""

    policy: Policy
    bits: Mapping[str, Any]


class Publisher:
    """Writes and announces versions under the epoch of its client."""

    def __init__(
        self,
        store: PolicyStore,
        model_folder: Path,
        streams: StreamClient,
        settings: PublishSettings,
        retries: Retries,
        sender: DirectSender | None = None,
        signatures: RunSignatures | None = None,
        audit_file: Path | None = None,
    ) -> None:
        """
        Args:
            model_folder: the initial policy, whose configuration and tokenizer every whole policy contains.
            sender: sends every announced policy to engines that ask; it is closed with the publisher.
            signatures: signs folders and announcements; None: nobody does.
            audit_file: as of `record_act`.
        """
        self._store = store
        self._model_folder = model_folder
        self._streams = streams
        self._settings = settings
        self._retries = retries
        self._sender = sender
        self._signatures = signatures or RunSignatures(SecuritySettings(), "")
        self._audit_file = audit_file
        self._policy: Policy | None = None
        self._base: _Base | None = None
        self._threads = ThreadPoolExecutor(1, "publish")
        self._publishing: Future[Policy] | None = None

    @classmethod
    def open(
        cls,
        settings: Settings,
        store: PolicyStore,
        streams: StreamClient,
        retries: Retries,
        signatures: RunSignatures,
    ) -> Publisher:
        """The publisher of a run; raises as `open_sender`."""
        sender, audit_file = open_sender(settings), settings.security.audit_file
        publish = settings.trainer.publish
        return cls(store, settings.model.path, streams, publish, retries, sender, signatures, audit_file)

    def publish(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor] | Adapter,
        canary: Canary | None = None,
        whole: bool = False,
    ) -> Policy:
        """Write and announce a policy, or an adapter alone. Delete old folders that no replica needs.

        Args:
            weights: must not be changed later.
            canary: by which engines tell whether they serve it; None: they cannot.
            whole: not as a delta.

        Raises:
            FencedError: a newer trainer has taken over.
            DiskFullError: the disk has no room for it, for too long.
        """
        began = time.perf_counter()
        name = f"v{version}-e{self._streams.epoch}"
        policy = self._retries.disk(partial(self._write, name, version, weights, whole))
        if canary is not None:
            policy.canary.CopyFrom(canary)
        self._store.complete(name, lambda: self._retries.redis(self._streams.check_epoch))
        if self._sender is not None:
            policy.direct.host, policy.direct.port = self._sender.host, self._sender.port
            self._sender.offer(self._store.find_files(policy))
        sign_announcement(policy, self._signatures)
        self._announce(policy)
        self._policy, self._base = policy, self._keep(policy, weights)
        size, seconds = measure_published(policy), time.perf_counter() - began
        PUBLISHED.inc()
        DELTAS.inc(bool(policy.parts))
        BYTES.set(size)
        SECONDS.set(seconds)
        get_logger().info(
            "policy_published",
            version=version,
            epoch=policy.epoch,
            digests=[file.digest.rpartition(":")[2][:12] for file in policy.files],
            bytes=size,
            delta=bool(policy.parts),
            seconds=round(seconds, 3),
        )
        record_act(
            "publish_policy",
            "trainer",
            self._audit_file,
            run=self._signatures.run,
            version=version,
            epoch=policy.epoch,
            uri=policy.uri,
            signed_by=self._signatures.key_id,
        )
        self._delete_unneeded(policy)
        return policy

    def begin(self, version: int, weights: Mapping[str, torch.Tensor] | Adapter, canary: Canary | None = None) -> None:
        """Publish on a thread. The one before must have been returned by `poll` or `wait`."""
        if self._publishing is not None:
            raise RuntimeError("the policy before this one was not waited for")
        self._publishing = self._threads.submit(self.publish, version, weights, canary)

    def poll(self) -> Policy | None:
        """Return the policy that has been announced since it was begun; None while there is none. Raises as `wait`."""
        return self.wait() if self._publishing is not None and self._publishing.done() else None

    def wait(self) -> Policy | None:
        """Return the policy that was begun, once it is announced; None where none was.

        Raises:
            Exception: as `publish`.
        """
        if self._publishing is None:
            return None
        publishing, self._publishing = self._publishing, None
        why = "what it waits for is named beside this"
        with waiting("a policy to be announced", on="the thread that publishes", limit_s=None, why_unlimited=why):
            return publishing.result()

    def close(self) -> None:
        """Wait for a policy that was begun: the caller has requested a stop, which ends its waits."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - must not take the place of the error that ends the run
            get_logger().warning("policy_not_published", reason=repr(error))
        finally:
            if self._sender is not None:
                self._sender.close()

    def announce_again(self) -> None:
        """Announce the last policy again if the server has lost the announcement."""
        if self._policy is not None and self._retries.redis(self._streams.read_policy) != self._policy:
            get_logger().warning("policy_announced_again", version=self._policy.version)
            self._announce(self._policy)

    def is_damaged(self) -> bool:
        """Whether an engine may lack the last policy, and its files are not what was announced."""
        if self._policy is None:
            return False
        replicas = self._retries.redis(lambda: self._streams.read_replicas(LIVELY_S)).values()
        is_served = any(one.serving == self._policy for one in replicas)
        # Engines of another machine, or of another service, may refuse what others have loaded in time.
        if is_served and not any(one.HasField("refused") and one.refused == self._policy for one in replicas):
            return False
        return not self._store.is_intact(self._policy)

    def _announce(self, policy: Policy) -> None:
        self._retries.redis(lambda: self._streams.publish(policy))

    def _write(self, name: str, version: int, weights: Mapping[str, torch.Tensor] | Adapter, whole: bool) -> Policy:
        """Write the folder of a version."""
        policy = Policy(version=version, epoch=self._streams.epoch, uri=self._store.name_address(name))
        with stage_folder(self._store.folder / name) as folder:
            if isinstance(weights, Adapter):
                policy.adapter = True
                files = write_adapter_folder(folder, weights)
            else:
                found = None if whole else self._write_delta(folder, policy, weights)
                files = found or write_model_folder(folder, self._model_folder, weights, self._settings.shard_bytes)
            policy.files.extend(_describe_files(files))
            policy.digest = files[0].digest if len(files) == 1 else ""
            policy.published_unix_ms = int(time.time() * 1000)
            write_description(folder, policy)
            sign_folder(folder, policy, self._signatures)
        return policy

    def _write_delta(
        self, folder: Path, policy: Policy, weights: Mapping[str, torch.Tensor]
    ) -> tuple[WeightsFile, ...] | None:
        """Write what has changed since the last announced version, if that is worth it, and add it to `policy.parts`.

        Returns: the files of the whole policy; None if it must be written whole.
        """
        base = self._base
        if base is None:
            return None
        bits = _view_bits(weights)
        if {name: (one.dtype, one.size) for name, one in bits.items()} != {
            name: (one.dtype, one.size) for name, one in base.bits.items()
        }:
            return None  # the type of the published weights has changed
        parts = list(base.policy.parts) or [_describe_part(base.policy, base.policy.files)]
        if len(parts) >= self._settings.full_every:
            return None
        files = digest_model_files(weights, self._settings.shard_bytes)
        size = sum(file.bytes for file in files)
        since = sum(file.bytes for part in parts[1:] for file in part.files)
        content = compute_content({file.name: file.digest for file in files})
        # A late replica reads all deltas since the whole policy: together they must not take longer than that.
        limit = min(size // DENSE, size - since)
        written = encode_delta(base.bits, bits, folder / DELTA, limit, parts[-1].content, content)
        if written is None:
            return None
        delta = PolicyFile(name=DELTA, digest=compute_digest(folder / DELTA), bytes=written)
        policy.parts.extend(
            [
                *parts,
                PolicyPart(version=policy.version, epoch=policy.epoch, uri=policy.uri, files=[delta], content=content),
            ]
        )
        return files

    def _keep(self, policy: Policy, weights: Mapping[str, torch.Tensor] | Adapter) -> _Base | None:
        if self._settings.full_every == 1 or isinstance(weights, Adapter):
            return None
        return _Base(policy, _view_bits(weights))

    def _delete_unneeded(self, current: Policy) -> None:
        """Delete the folders that neither the newest versions nor a replica's need."""
        self._retries.redis(self._streams.prune)
        # Read after the announcement: from then on a replica moves to the new version only, never to an old one.
        replicas = self._retries.redis(self._streams.read_replicas)
        serving = [replica.serving for replica in replicas.values()]
        names = self._store.list_names()
        newest = [self._describe_kept(name) for name in names[:KEEP_NEWEST]]
        needed = {*names[:KEEP_NEWEST]}.union(*map(list_needed, [current, *filter(None, newest), *serving]))
        self._store.delete([name for name in names if name not in needed])

    def _describe_kept(self, name: str) -> Policy | None:
        """The description of a folder that stays for now; None too where it is damaged: the run does not need it."""
        try:
            return describe_folder(self._store.folder / name)
        except DataError as error:
            get_logger().warning("policy_description_damaged", detail=str(error))
            return None


def measure_published(policy: Policy) -> int:
    """Count the bytes that were published for a policy: of its delta, or of all its weights."""
    return sum(file.bytes for file in (policy.parts[-1].files if policy.parts else policy.files))


def _describe_files(files: Iterable[WeightsFile]) -> list[PolicyFile]:
    return [PolicyFile(name=file.name, digest=file.digest, bytes=file.bytes) for file in files]


def _describe_part(policy: Policy, files: Iterable[PolicyFile]) -> PolicyPart:
    content = compute_content({file.name: file.digest for file in files})
    return PolicyPart(version=policy.version, epoch=policy.epoch, uri=policy.uri, files=files, content=content)


def _view_bits(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The elements of tensors as flat arrays of unsigned integers, in the same memory."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return {name: w.detach().reshape(-1).view(unsigned[w.itemsize]).numpy() for name, w in weights.items()}


def find_policies_place(uri: str) -> str:
    """The address of `trainer.publish.uri`; a folder as an absolute path, as engines have another working directory.

    Raises:
        SettingsError: no installed file system has such addresses.
    """
    open_file_system(uri, "trainer.publish.uri", "the environments of trainer and rollout service")
    return str(find_local_folder(uri) or uri.rstrip("/"))


class PolicyStore:
    """The folders of the versions of one run, `v<version>-e<epoch>`."""

    def __init__(self, folder: Path, uri: str, run_id: str, retry: StorageRetry) -> None:
        """
        Args:
            folder: parent of the folders.
            uri: parent of the copies' parent, which has the name of the run; empty: the engines read the folders.

        Raises:
            UserError: no installed file system has such addresses, or nothing can be written there.
            Stopped: the process was asked to stop while the address was unavailable.
        """
        self.folder = folder
        self._retry = retry
        self._root = f"{find_policies_place(uri)}/{run_id}" if uri else ""
        if uri:
            retry(self._probe)
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def _probe(self) -> None:
        """Write there before anything is trained: what is wrong with an address is said at once, not waited for."""
        try:
            probe_folder(self._root)
        except StorageRefusedError as error:
            raise UserError(f"trainer.publish.uri cannot be used: {error}") from None

    def name_address(self, name: str) -> str:
        """The address under which the engines find a folder."""
        return f"{self._root}/{name}" if self._root else str((self.folder / name).resolve())

    def complete(self, name: str, check: Callable[[], object]) -> None:
        """Return once a folder is complete at its address, however long that is unavailable.

        Args:
            check: called when an attempt has failed; raises where a later trainer works, which deletes these files.

        Raises:
            Stopped: the process was asked to stop meanwhile.
        """
        if self._root:

            def put() -> None:
                try:
                    files = {file.name: file for file in (self.folder / name).iterdir()}
                    put_files(self.name_address(name), files)
                except (StorageError, FileNotFoundError):
                    check()
                    raise

            self._retry(put)

    def list_names(self) -> list[str]:
        """List the names of all folders, and of all copies that can be listed now, the newest first."""
        names = {path.name for path in self.folder.iterdir()}
        if self._root:
            try:
                names.update(list_folders(self._root))
            except StorageError as error:
                get_logger().warning("policies_not_listed", reason=str(error))
        orders = {name: order for name in names if (order := parse_name(name)) is not None}
        return sorted(orders, key=orders.__getitem__, reverse=True)

    def find_highest_epoch(self) -> int:
        """The highest epoch in the names of the folders and their copies; 0 without any.

        Raises:
            Stopped: the process was asked to stop while the address was unavailable.
        """
        copies = self._retry(lambda: list_folders(self._root)) if self._root else []
        orders = map(parse_name, [*copies, *(path.name for path in self.folder.iterdir())])
        return max((order[0] for order in orders if order is not None), default=0)

    def is_intact(self, policy: Policy) -> bool:
        """Whether a policy's files are what was announced; of copies, if they can be listed, the sizes."""
        parts = [(part.uri, part.files) for part in policy.parts] or [(policy.uri, policy.files)]
        return all(self._has_files(name_folder(uri), files) for uri, files in parts)

    def find_files(self, policy: Policy) -> dict[str, Path]:
        """Find the files of all folders of a policy on this machine, by their digests."""
        parts = [(part.uri, part.files) for part in policy.parts] or [(policy.uri, policy.files)]
        return {file.digest: self.folder / name_folder(uri) / file.name for uri, files in parts for file in files}

    def delete(self, names: Iterable[str]) -> None:
        """Delete folders and their copies. A copy that cannot be deleted now is listed, and deleted, later."""
        for name in names:
            remove_folder(self.folder / name)
            remove_folder(name_whole(self.folder / name))
            if self._root:
                try:
                    delete_folder(self.name_address(name))
                except StorageError as error:
                    get_logger().warning("policy_not_deleted", reason=str(error))

    def _has_files(self, name: str, files: Iterable[PolicyFile]) -> bool:
        try:
            if not all(verify_digest(self.folder / name / file.name, file.digest) for file in files):
                return False
            sizes = list_sizes(self.name_address(name))
            return all(sizes.get(file.name) == file.bytes for file in files)
        except OSError:
            return False
        except StorageError:
            return True
