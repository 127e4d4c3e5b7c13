"""What must hold of published policies: the engines serve what was computed, and what is announced can be loaded."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy
from forage_weights.announcement import list_parts
from forage_weights.cache import CachedPolicy
from forage_weights.delta import apply_delta
from forage_weights.digests import compute_content, compute_digest
from forage_weights.tensors import SUFFIX, open_tensors
from simulation.storage import PROTOCOL, ObjectStore, set_time
from simulation.world import World

Bits = Mapping[str, Any]
"""Tensor name → its elements, as unsigned integers."""


class Policies:
    """The policies of one run, as whoever sees everything knows them.

    read_announced: the policy that is announced now.
    """

    def __init__(self, world: World, store: ObjectStore, read_announced: Callable[[], Policy | None]) -> None:
        self._world = world
        self._store = store
        self._read_announced = read_announced
        self._computed: dict[tuple[int, int], dict[str, bytes]] = {}

    def note_computed(self, epoch: int, version: int, weights: Mapping[str, Any]) -> None:
        """Note the weights that a trainer has computed and is about to publish."""
        bits = {name: weight.numpy().tobytes() for name, weight in weights.items()}
        if self._computed.setdefault((epoch, version), bits) != bits:
            self._world.failures.append(f"version {version} of epoch {epoch} is published with other weights")

    def check_served(self, name: str, policy: Policy, bits: Bits) -> None:
        """Check what an engine serves as a policy."""
        found = {tensor: array.tobytes() for tensor, array in bits.items()}
        if self._computed.get((policy.epoch, policy.version)) != found:
            self._world.failures.append(
                f"{name} serves other weights than version {policy.version} of epoch {policy.epoch} has"
            )

    def check_announced(self) -> None:
        """Check that what is announced can be loaded by whoever has nothing of it."""
        policy = self._read_announced()
        if policy is None:
            return
        for address, digest in list_addresses(policy):
            if address not in self._store.altered and self._digest(address) != digest:
                self._world.failures.append(
                    f"{'/'.join(address.split('/')[-2:])} is not what the announced policy "
                    f"v{policy.version}-e{policy.epoch} needs"
                )

    def damage(self, is_deletion: bool) -> None:
        """Damage a file of the announced policy where the engines read it, or delete it."""
        policy = self._read_announced()
        addresses = [] if policy is None else [address for address, _ in list_addresses(policy)]
        if not addresses:
            return
        address = self._world.random.choice(addresses)
        data = self._read(address)
        if data is None:
            return
        self._store.altered.add(address)
        damaged = None if is_deletion else data[:-1] + bytes([data[-1] ^ 1])
        if address in self._store.files:
            self._store.files.pop(address)
            if damaged is not None:
                self._store.files[address] = damaged
        elif damaged is None:
            Path(address).unlink()
        else:
            Path(address).write_bytes(damaged)

    def _read(self, address: str) -> bytes | None:
        if address in self._store.files:
            return self._store.files[address]
        try:
            return Path(address).read_bytes()
        except OSError:
            return None

    def _digest(self, address: str) -> str:
        data = self._read(address)
        return "" if data is None else compute_digest(data)


def list_watched(policies: Policies) -> list[tuple[Any, str, Any]]:
    """What is replaced to see what the trainer publishes and deletes: (owner, name, value)."""
    from forage_weights.trainer import publisher
    from forage_weights.trainer.publisher import Publisher

    real_publish = Publisher.publish

    def publish(self: Publisher, version: int, weights: Any, canary: Any = None, whole: bool = False) -> Policy:
        policies.note_computed(self._streams.epoch, version, weights)
        return real_publish(self, version, weights, canary, whole)

    def watch(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = real(*args)
            policies.check_announced()
            return result

        return call

    names = ("remove_folder", "delete_folder")
    return [(Publisher, "publish", publish), *((publisher, one, watch(getattr(publisher, one))) for one in names)]


def list_addresses(policy: Policy) -> Iterator[tuple[str, str]]:
    """List the files that hold a policy: (address, digest)."""
    for part in list_parts(policy):
        for file in part.files.values():
            yield f"{part.uri.removeprefix(f'{PROTOCOL}://')}/{file.name}", file.digest


def map_weights(held: CachedPolicy) -> dict[str, Any]:
    """Map the weights of a policy into memory: what is written to its files is seen."""
    files = [file for file in held.files if file.suffix == SUFFIX]
    return {name: tensor.bits for file in files for name, tensor in open_tensors(file).items()}


def follow_deltas(held: CachedPolicy, content: str, bits: Bits) -> dict[str, Any] | None:
    """Change weights as the deltas do that lead on from them; None where there are none."""
    begin = next((number for number, one in enumerate(held.deltas) if one.base == content), None)
    if begin is None:
        return None
    changed = {name: array.copy() for name, array in bits.items()}
    for one in held.deltas[begin:]:
        for file in one.files:
            apply_delta(file, changed)
    return changed


def damage_cache(world: World, store: ObjectStore, folder: Path) -> None:
    """Damage a file of a cache that no engine reads: what it reads now, it has verified."""
    files = sorted(folder.glob(f"[!.]*/*{SUFFIX}"))
    if not files:
        return
    file = world.random.choice(files)
    with (file.parent / ".lock").open("w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        set_time(world, file)
        store.altered.add(str(file))


def check_cache(folder: Path, altered: set[str]) -> Iterator[str]:
    """Find folders of a cache that are not what they are named by, and were not damaged by a fault."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_dir() and not entry.name.startswith("."):
            files = sorted(entry.glob(f"*{SUFFIX}"))
            content = compute_content({file.name: compute_digest(file) for file in files})
            if content.rpartition(":")[2] != entry.name and altered.isdisjoint(map(str, files)):
                yield f"the cache has another policy under the name {entry.name[:12]}"
