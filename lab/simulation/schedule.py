"""One schedule: run a scenario to its end, and check what must hold whatever happened."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import structlog

from forage_proto.v1.trajectory_pb2 import LedgerEntry, Policy
from forage_queue.checker.check import Limits, check_operations
from forage_queue.checker.operations import read_history
from forage_queue.streams.client import StreamClient
from forage_queue.streams.payloads import FOLDER, ORPHAN_S, Payloads
from forage_queue.trainer.feeder import make_batches
from forage_runtime.settings import Settings
from simulation import machine
from simulation.faults import Faults
from simulation.gpus import SharedGpus
from simulation.machine import Disk
from simulation.policies import Policies, check_cache, list_watched
from simulation.programs import Operator, Programs, make_questions, score
from simulation.redis_server import Server, patch_connections
from simulation.scenario import STANDS_STILL, Fault, Scenario
from simulation.storage import ObjectStore, list_replaced
from simulation.world import Process, World

QUESTIONS, VALIDATION_QUESTIONS = 11, 2
LIMIT_S = 1800.0
"""Virtual time that a run may take beyond the time of its faults."""
_SAME_ERROR = 5
_MEMORY = Path("/dev/shm")
_SIGNS_OF_LIFE = {"xclaim", "acknowledge_policy", "prune"}
_AROUND = 8
"""Lines of a history that are shown before a fault; twice as many after it, and three times as many at the end."""
_FAIL_GROUPS = {"engines fail", "policies refused", "policy damaged", "policy deleted", "storage down", "disk full"}
"""After these an engine may have nothing to sample with for longer than a group is tried."""
_ONLY_POLICIES = {"policy damaged", "policy deleted", "cache damaged", "cache lost"}
_UNFORESEEN = {"dispatcher_restarts", "task_failed", "group_not_written"}
"""Events of the log that stand for an error which its program did not foresee."""


@dataclass
class Outcome:
    """The end of a schedule. seconds: virtual; injected: the faults that came; history: empty unless asked for."""

    scenario: Scenario
    seconds: float
    injected: tuple[Fault, ...]
    violations: tuple[str, ...]
    history: tuple[str, ...] = field(default=(), repr=False)


def run_schedule(scenario: Scenario, is_traced: bool = False) -> Outcome:
    """Run a scenario."""
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        # What a killed process leaves is collected after the schedule, not somewhere in it.
        gc.disable()
        with mock.patch.object(sys, "unraisablehook"):
            outcome = _run(scenario, folder, is_traced)
            gc.collect()
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(scenario: Scenario, folder: Path, is_traced: bool) -> Outcome:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = scenario.build_settings(folder)
    run_folder = settings.run.folder
    world, disk = World(scenario.seed), Disk()
    server = Server(world)

    def draw_seconds(what: str) -> float:
        low, high = scenario.ranges[what]
        return float(low * (high / low) ** world.random.random())

    store = ObjectStore(world, draw_seconds)
    policies = Policies(world, store, lambda: _read_announced(server))
    caches = {
        f"rollout-{i}": folder / ("cache" if scenario.shares_cache else f"cache-{i}")
        for i in range(1, scenario.rollouts + 1)
    }
    faults = Faults(world, scenario.faults, server, disk, run_folder / "checkpoints", is_traced)
    _configure_logs(world, faults)

    store.on_change = faults.on_change
    replaced, close_locks = list_replaced(world, store, lambda: disk.full_until > world.now, draw_seconds)
    replaced += list_watched(policies)
    questions = make_questions(QUESTIONS, "train"), make_questions(VALIDATION_QUESTIONS, "test")
    gpus = SharedGpus(world, STANDS_STILL.isdisjoint(fault.kind for fault in scenario.faults))
    with patch_connections(world, server, faults.on_command), machine.install(world, disk, faults.on_change, replaced):
        programs = Programs(
            world, settings, questions, draw_seconds, scenario.engines, policies, store, caches, faults.note, gpus
        )
        operator = Operator(programs, scenario.rollouts, folder)
        faults.programs, faults.operator = programs, operator
        Process(world, "operator", operator.run)
        limit_s = LIMIT_S + sum(abs(fault.seconds) + fault.delay_s for fault in scenario.faults)

        def is_over() -> bool:
            stuck = len(programs.errors) >= _SAME_ERROR and len(set(programs.errors[-_SAME_ERROR:])) == 1
            return operator.is_done or bool(world.failures) or stuck

        world.run(is_over, limit_s)
        violations = list(world.failures)
        if not operator.is_done and not violations:
            why = f"the trainer ends with: {programs.errors[-1]}" if programs.errors else "nothing ended it"
            violations.append(f"the run hangs at {world.now:.0f} s: {why}")
        if not violations:
            world.run(lambda: not any(zombie.is_alive for zombie in faults.zombies), world.now + 700.0)
            violations += [f"replaced trainer of {z.started:.0f} s goes on" for z in faults.zombies if z.is_alive]
            violations += world.failures
        if not violations:
            probe = Process(world, "check", lambda: violations.extend(_check(settings, questions[0], scenario)) or 0)
            world.run(lambda: not probe.is_alive, world.now + 60.0)
            probe = Process(world, "sweep", lambda: violations.extend(_check_files(settings, store)) or 0)
            world.run(lambda: not probe.is_alive, world.now + 3 * ORPHAN_S)
            violations += world.failures
            violations += _check_history(settings)
            for cache in sorted(set(caches.values())):
                violations += check_cache(cache, store.altered)
            if programs.timeouts and _ONLY_POLICIES.issuperset(fault.kind for fault in faults.injected):
                violations.append("a trainer waited in vain, although it can publish what engines cannot load again")
        seconds = world.now
        world.close()
        close_locks()
    return Outcome(scenario, seconds, tuple(faults.injected), tuple(violations), tuple(faults.history))


def _read_announced(server: Server) -> Policy | None:
    found = server.store.execute("HGET", "forage:{run}:policy", "m")
    return None if found is None else Policy.FromString(found)


def _check(settings: Settings, train: Any, scenario: Scenario) -> Iterator[str]:
    """Find what a finished run violates: in its newest checkpoint, the ledger and the streams."""
    trainer, folder = settings.trainer, settings.run.folder
    total = trainer.total_training_steps
    expected = _list_expected(settings, train, any(fault.kind in _FAIL_GROUPS for fault in scenario.faults))
    newest = folder / "checkpoints" / f"step_{total}"
    trained = json.loads((newest / "state" / "weights.json").read_text())
    rollbacks = folder / "rollbacks.json"
    entries = json.loads(rollbacks.read_text()) if rollbacks.exists() else []
    skipped = {entry["step"] for entry in entries}
    steps = [step for step, _ in trained]
    if steps != [step for step in range(1, total + 1) if step not in skipped]:
        yield f"the weights were trained on steps {steps}, of 1 to {total} without {sorted(skipped)}"
    streams = StreamClient(settings.redis, settings.run.id, 4.0)
    ledger = streams.read_ledger()
    batches = make_batches(train.rows, settings)
    if trainer.batching == "ready":
        yield from _check_places(settings, train, expected, trained, ledger, entries)
    for step, groups in trained if trainer.batching == "strict" else ():
        found = {position: uid for position, uid, _ in groups}
        missing = expected[step].keys() - found.keys()
        dropped = missing  # a ledger that was lost says nothing
        if step in ledger or not scenario.straggler_s:
            uids = ledger[step].dropped_group_uids if step in ledger else ()
            asked = {p: {batches.group(step, p, n)[0] for n in range(trainer.max_refills + 1)} for p in expected[step]}
            dropped = {position for position, names in asked.items() if not names.isdisjoint(uids)}
        if missing != dropped or any(uid not in expected[step].get(p, []) for p, uid in found.items()):
            yield f"step {step} trained on {found}, not on {expected[step]}"
    is_whole = not any(fault.kind == "redis lost" for fault in scenario.faults)  # else the ledger begins there
    if is_whole and list(ledger) != list(range(1, total + 1)):
        yield f"the ledger has steps {list(ledger)}"
    for step, groups in trained:
        if (is_whole or step in ledger) and sorted(ledger[step].group_uids) != sorted(uid for _, uid, _ in groups):
            yield f"step {step}: the ledger has {list(ledger[step].group_uids)}, the weights {groups}"
    twice = [uid for uid, count in Counter(uid for _, groups in trained for _, uid, _ in groups).items() if count > 1]
    if twice:
        yield f"trained on twice: {twice}"
    left = {name: streams.count_backlog(name) for name in (streams.prompts, streams.trajectories)}
    # Nobody reads what is forged after the end.
    if any(left.values()) and not any(fault.kind == "group forged" for fault in scenario.faults):
        yield f"entries are left on the streams: {left}"
    labels = {"before": 0, "after": total}
    if trainer.test_freq > 0:
        labels |= {f"step-{step}": step for step in range(trainer.test_freq, total, trainer.test_freq)}
    if watch := trainer.watch_questions.freq:
        labels |= {f"watch-{step}": step for step in (*range(0, total, watch), total)}
    for label, version in labels.items():
        try:
            result = json.loads((folder / "validation" / f"{label}.json").read_text())
        except OSError:
            yield f"validation {label} has no result"
            continue
        count = trainer.watch_questions.count if label.startswith("watch-") else VALIDATION_QUESTIONS
        if (result["version"], result["count"]) != (version, count):
            yield f"validation {label}: {result}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reported = [line["step"] for line in lines]
    if not set(range(1, total + 1)).issubset(reported):  # a replaced trainer may add a line of its own
        yield f"metrics.jsonl has steps {reported}"
    policy = streams.read_policy()
    if policy is None or policy.version != total:
        yield f"the announced policy is not that of step {total}"


def _check_places(
    settings: Settings,
    train: Any,
    expected: dict[int, dict[int, list[str]]],
    trained: Sequence[Any],
    ledger: Mapping[int, LedgerEntry],
    rollbacks: Sequence[Any],
) -> Iterator[str]:
    """Find what violates that each place of each batch is settled by one step, and each step settles as many."""
    size, batches = settings.data.train_batch_size, make_batches(train.rows, settings)
    places = {
        batches.group(batch, position, refill)[0]: (batch, position)
        for batch, positions in expected.items()
        for position in positions
        for refill in range(settings.trainer.max_refills + 1)
    }
    settled = {step: [*entry.group_uids, *entry.dropped_group_uids] for step, entry in ledger.items()}
    for step, groups in trained:
        settled.setdefault(step, [uid for _, uid, _ in groups])
        for position, uid, _ in groups:
            batch = places[uid][0]
            if places[uid][1] != position or uid not in expected[batch][position]:
                yield f"step {step} trained on {uid} at {position}, of batch {batch} not on {expected[batch]}"
    of_steps = {step: sorted(places[uid] for uid in uids) for step, uids in settled.items()}
    counts = Counter(place for found in of_steps.values() for place in found)
    if again := sorted(place for place, count in counts.items() if count > 1):
        yield f"settled twice: {again}"
    if set(range(1, settings.trainer.total_training_steps + 1)) <= ledger.keys():
        if missing := sorted(set(places.values()) - counts.keys()):
            yield f"never settled: {missing}"
        if wrong := {step: found for step, found in of_steps.items() if len(found) != size}:
            yield f"steps settled more or less than {size}: {wrong}"
        for entry in rollbacks:
            if of_steps[entry["step"]] != sorted(map(tuple, entry["places"])):
                yield f"step {entry['step']} was rolled back with {entry['places']}, skips {of_steps[entry['step']]}"


def _check_files(settings: Settings, store: ObjectStore) -> Iterator[str]:
    """Find files of groups that are left once the orphans are old enough to be deleted."""
    time.sleep(2 * ORPHAN_S)  # wait: on the virtual clock, which a fault may have set back by an hour
    streams = StreamClient(settings.redis, settings.run.id, 4.0, payloads=Payloads(settings))
    streams.epoch = streams.read_epoch()
    streams.delete_orphans()
    left = [str(file) for file in (settings.run.folder / FOLDER).glob("*/*")]
    left += [name for name in store.files if "/groups/" in name and not name.endswith("/shared")]
    if left:
        yield f"files of groups are left: {left}"


def _check_history(settings: Settings) -> Iterator[str]:
    """Find what the recorded operations of a finished run violate."""
    trainer = settings.trainer
    limits = Limits(
        settings.data.train_batch_size, trainer.total_training_steps, trainer.max_staleness, trainer.batching
    )
    history = read_history(settings.run.folder)
    report = check_operations(history, limits)
    for violation in report.violations:
        shown = "; ".join(one.describe(history.origin) for one in violation.operations)
        yield f"history ({violation.rule}): {violation.sentence}: {shown}"
    if not report.is_complete:
        yield f"history: steps {report.steps} of {report.total_steps}, outstanding {report.outstanding}"


def _list_expected(settings: Settings, train: Any, has_failures: bool) -> dict[int, dict[int, list[str]]]:
    """Step → position → uids of the groups of which an undisturbed run trains on one.

    One uid, except where a group may have failed: it is kept, and one with equal rewards would have been replaced.
    """
    batches, trainer = make_batches(train.rows, settings), settings.trainer
    expected: dict[int, dict[int, list[str]]] = {}
    for step in range(1, trainer.total_training_steps + 1):
        for position in range(settings.data.train_batch_size):
            uids = [batches.group(step, position, refill)[0] for refill in range(trainer.max_refills + 1)]
            unequal = [uid for uid in uids if score(uid, 0) != score(uid, 1)]
            chosen = uids if has_failures else [*unequal, uids[-1]][:1]
            expected.setdefault(step, {})[position] = chosen if trainer.max_refills else uids[:1]
    return expected


def shrink(outcome: Outcome) -> Outcome:
    """Remove faults for as long as the schedule still violates something; returns the shortest, with its history."""
    best = outcome.scenario
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for number in range(len(best.faults)):
            fewer = replace(best, faults=best.faults[:number] + best.faults[number + 1 :])
            if run_schedule(fewer).violations:
                best, is_shorter = fewer, True
                break
    return run_schedule(best, is_traced=True)


def _configure_logs(world: World, faults: Faults) -> None:
    """Send the log of all programs to the history; errors that no program foresees count as violations."""

    def write(_logger: Any, method: str, event: dict[str, Any]) -> str:
        shown = {name: value for name, value in event.items() if name not in ("event", "exc_info", "seconds")}
        faults.note(f"     {method}: {event['event']} {shown}")
        if event["event"] in _UNFORESEEN:
            world.failures.append(f"{event['event']}: {sys.exc_info()[1]!r} {shown}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[write],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO if faults.is_traced else logging.ERROR),
        cache_logger_on_first_use=False,
    )


def format_outcome(outcome: Outcome) -> str:
    """Describe a schedule: what it violates, its settings and faults, and the parts of its history around them."""
    scenario = outcome.scenario
    shown = {k: v for k, v in vars(scenario).items() if k not in ("faults", "seed", "ranges")}
    head = [f"seed {scenario.seed}: {violation}" for violation in outcome.violations]
    faults = [f"  fault: {fault}" for fault in scenario.faults]
    return "\n".join([*head, f"  run: {shown}", *faults, *(f"  {line}" for line in shorten(outcome.history))])


def shorten(history: Sequence[str]) -> Iterator[str]:
    """Leave out signs of life, and what is far from a fault and from the end."""
    lines = [line for line in history if line.split()[-1] not in _SIGNS_OF_LIFE]
    faults = [number for number, line in enumerate(lines) if " FAULT " in line]
    kept = {number for fault in faults for number in range(fault - _AROUND, fault + 2 * _AROUND)}
    kept |= set(range(len(lines) - 3 * _AROUND, len(lines)))
    last = -1
    for number, line in enumerate(lines):
        if number in kept:
            if number > last + 1:
                yield f"… {number - last - 1} lines"
            last = number
            yield line
