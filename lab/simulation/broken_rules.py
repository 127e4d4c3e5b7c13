"""Rules of the programs, each put out of force: the simulation must notice every one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from forage_proto.v1.trajectory_pb2 import Policy
from forage_queue.rollout import lease_watch
from forage_queue.rollout.dispatcher import Dispatcher
from forage_queue.streams import functions, payloads
from forage_queue.streams.client import StreamClient
from forage_queue.trainer import gpu_lease
from forage_queue.trainer.batcher import Arrivals, Batcher, Receiver, UnackedSteps
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_queue.trainer.slots import ConsumedSlots
from forage_runtime.files import durable
from forage_trainer.checkpoints.rollbacks import Rollbacks
from forage_weights import cache
from forage_weights.announcement import list_files
from forage_weights.folders import name_folder
from forage_weights.trainer import publisher
from forage_weights.trainer.publisher import PolicyStore, Publisher
from forage_weights.trainer.refusals import Refusals
from simulation import programs
from simulation.scenario import SLOW, Scenario, draw_scenario

TrainingLoop = programs.TrainingLoop  # its maths is replaced before it is imported


@contextmanager
def _replace(*parts: tuple[Any, str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in parts:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def _without_fence() -> Iterator[None]:
    read = functions.read_script
    fence = read("fence")
    fenced = ("acknowledge", "discard", "issue", "reclaim", "close_stream", "prune", "publish")
    scripts = {name: read(name).replace(fence, "") for name in fenced}
    made = (functions.build_library, functions.name_function)  # once for each process
    with _replace(
        (functions, "read_script", lambda name: scripts.get(name) or read(name)),
        (StreamClient, "check_epoch", lambda _: None),
    ):
        for one in made:
            one.cache_clear()
        yield
    for one in made:
        one.cache_clear()


async def _never(*_: Any) -> None:
    await asyncio.Event().wait()


async def _at_once(*_: Any) -> bool:
    return True


_ANY_BATCH = 10**9


def _reclaim_known() -> tuple[Any, str, Any]:
    real = Arrivals.reclaim

    def reclaim(self: Arrivals) -> Any:
        self._known.clear()
        return real(self)

    return Arrivals, "reclaim", reclaim


def _discard_at_once() -> tuple[Any, str, Any]:
    real = Batcher._accept

    def accept(self: Batcher, entries: Any) -> int:
        new = real(self, entries)
        self._discard_late(_ANY_BATCH)
        return new

    return Batcher, "_accept", accept


def _nothing_lost() -> tuple[Any, str, Any]:
    def find_lost(self: Arrivals, receiver: Receiver) -> dict[tuple[int, int], Any]:
        receiver.accept(self.reclaim())
        return {}

    return Arrivals, "find_lost", find_lost


def _list_unverified(policy: Policy, folder: Path, files: Any = None) -> list[Path]:
    return [folder / name for name in (list_files(policy) if files is None else files)]


def _ignore_readers() -> AbstractContextManager[None]:
    real = cache._wait_for_lock

    def wait(handle: int, policy: Policy, what: str, limit_s: float) -> None:
        if not what.startswith("engines that read"):
            real(handle, policy, what, limit_s)

    return _replace((cache, "_wait_for_lock", wait))


def _issue_without_report(self: TrainingLoop, policy: Policy | None) -> None:
    if policy is not None:
        self._feeder.issue_up_to_bound(policy.version)


@dataclass(frozen=True)
class BrokenRule:
    """A rule. kinds: faults that it is there for; break_it: puts it out of force; changes: fields of the scenarios."""

    name: str
    kinds: tuple[str, ...]
    break_it: Callable[[], AbstractContextManager[None]]
    changes: Mapping[str, Any] = field(default_factory=dict)

    def draw_scenario(self, seed: int) -> Scenario:
        """A scenario in which the rule is needed more often than in others."""
        return replace(draw_scenario(seed, self.kinds), **self.changes)


_CRASHES = ("crash before", "crash after")
BROKEN_RULES = (
    BrokenRule("a replaced trainer is fenced off", ("second trainer",), _without_fence),
    BrokenRule(
        "prompts of a dead dispatcher are taken over",
        _CRASHES,
        lambda: _replace((Dispatcher, "_reclaim", _never), (Dispatcher, "_take_over", _at_once)),
    ),
    BrokenRule(
        "groups that an earlier trainer claimed are taken over",
        _CRASHES,
        lambda: _replace((Arrivals, "reclaim", lambda _: []), _nothing_lost()),
    ),
    BrokenRule(
        "consumed groups stay until their checkpoint",
        _CRASHES,
        lambda: _replace(_reclaim_known(), _discard_at_once(), _nothing_lost()),
        # Long silences while groups are consumed and not in a checkpoint.
        {"save_freq": 8, "test_freq": -1, "max_staleness": 0, "straggler_s": 0.0, "ranges": SLOW},
    ),
    BrokenRule("lost groups are issued again", ("group deleted", "prompt deleted"), lambda: _replace(_nothing_lost())),
    BrokenRule(
        "tokens are not older than max_staleness",
        _CRASHES,
        lambda: _replace(
            (Dispatcher, "_wait_until_policy_served", _at_once), (Batcher, "_drop_stale", lambda *_: None)
        ),
    ),
    BrokenRule(
        "a checkpoint names what is not acknowledged",
        _CRASHES,
        lambda: _replace((UnackedSteps, "restore", lambda *_: None)),
    ),
    BrokenRule(
        "a checkpoint knows which slots are settled",
        _CRASHES,
        lambda: _replace((ConsumedSlots, "load_state_dict", lambda self, state: self.restart(state["batches"]))),
        {"takes_first": True, "is_colocated": False, "max_staleness": 2, "save_freq": 1, "ranges": SLOW},
    ),
    BrokenRule(
        "a step that was rolled back keeps its groups",
        ("bad step",),
        lambda: _replace((Rollbacks, "slots", {})),
        {"takes_first": True, "is_colocated": False, "max_staleness": 2, "save_freq": 3},
    ),
    BrokenRule(
        "the groups of young checkpoints are kept",
        ("damaged checkpoint",),
        lambda: _replace((ReplayGroups, "write", lambda *_: None)),
    ),
    BrokenRule(
        "temporary files of living processes stay",
        ("second trainer",),
        lambda: _replace((durable, "is_abandoned", lambda _: True)),
    ),
    BrokenRule(
        "policies are verified before they are served",
        ("policy damaged", "cache damaged"),
        lambda: _replace(
            (cache, "verify_files", _list_unverified),
            (cache, "_verify", lambda *_: None),
            (cache, "_is_trusted", lambda _: True),
        ),
    ),
    BrokenRule(
        "copies that an engine reads are not patched",
        _CRASHES,
        _ignore_readers,
        {"engines": 2, "full_every": 16, "ranges": SLOW | {"load": (5.0, 30.0), "transfer": (0.01, 0.1)}},
    ),
    BrokenRule(
        "policies are complete before they are announced",
        ("storage down",),
        lambda: _replace((PolicyStore, "complete", lambda *_: None)),
        {"has_storage": True},
    ),
    BrokenRule(
        "what an announced policy needs is not deleted",
        _CRASHES,
        lambda: _replace((publisher, "list_needed", lambda policy: {name_folder(policy.uri)})),
        {"steps": 7, "full_every": 16},
    ),
    BrokenRule(
        "what no engine can load is published again",
        ("policy damaged", "policy deleted"),
        lambda: _replace(
            (Publisher, "is_damaged", lambda _: False), (Refusals, "is_to_be_published_again", lambda _: False)
        ),
        {"rollouts": 1},
    ),
    BrokenRule(
        "the file of a group is whole before an entry names it",
        _CRASHES,
        lambda: _replace((payloads._Folder, "write", lambda *_: None), (payloads.Payloads, "shares", lambda *_: True)),
        {"has_files": True, "has_storage": False},
    ),
    BrokenRule(
        "a group whose file is lost is issued again",
        ("file damaged", "file deleted"),
        lambda: _replace(_nothing_lost()),
        {"has_files": True},
    ),
    BrokenRule(
        "files that no entry names are deleted",
        _CRASHES,
        lambda: _replace((payloads.Payloads, "list_old", lambda _: {})),
        {"has_files": True, "rollouts": 2},
    ),
    BrokenRule(
        "the trainer takes shared GPUs once every engine sleeps",
        _CRASHES,
        lambda: _replace((gpu_lease.GpuLease, "_find_awake", lambda *_: [])),
        {"is_colocated": True},
    ),
    BrokenRule(
        "an engine that starts takes no memory in the trainer's shift",
        _CRASHES,
        lambda: _replace((lease_watch.LeaseWatch, "wait_for_engines", _at_once)),
        {"is_colocated": True},
    ),
    BrokenRule(
        "a step is reported once its policy is announced",
        _CRASHES,
        lambda: _replace((TrainingLoop, "_note_announced", _issue_without_report)),
        {"max_staleness": 1, "save_freq": 8},
    ),
)
