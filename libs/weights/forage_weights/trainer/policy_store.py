"""Where published policies lie: in the run's folder, and where `trainer.publish.uri` says, copies for the engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_runtime.errors import UserError
from forage_runtime.files.folders import remove_folder, remove_leftovers
from forage_runtime.files.remote import StorageError, open_file_system
from forage_runtime.retries import StorageRetry
from forage_runtime.telemetry.logs import get_logger
from forage_weights.digests import verify_digest
from forage_weights.folders import name_folder, name_whole
from forage_weights.storage import (
    StorageRefusedError,
    delete_folder,
    find_local_folder,
    list_folders,
    list_sizes,
    probe_folder,
    put_files,
)

_NAME = re.compile(r"v(\d+)-e(\d+)", re.ASCII)


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
        return sorted(filter(_NAME.fullmatch, names), key=_parse_name, reverse=True)

    def find_highest_epoch(self) -> int:
        """The highest epoch in the names of the folders and their copies; 0 without any.

        Raises:
            Stopped: the process was asked to stop while the address was unavailable.
        """
        copies = self._retry(lambda: list_folders(self._root)) if self._root else []
        names = filter(_NAME.fullmatch, [*copies, *(path.name for path in self.folder.iterdir())])
        return max((_parse_name(name)[0] for name in names), default=0)

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


def _parse_name(name: str) -> tuple[int, int]:
    """(epoch, version) in the name of a folder."""
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[2]), int(found[1])
