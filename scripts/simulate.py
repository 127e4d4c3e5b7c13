"""Tries seeded schedules of a simulated run and reports what they violate.

    simulate.py [--first SEED] [--jobs N] [SCHEDULES]     schedules of so many seeds
    simulate.py --seed SEED                               the history of one seed, with all of its faults
    simulate.py --broken-rules                            break every rule of the programs: is it noticed?

Run it in the environment of the trainer. It prints a table, the shortest history of failing seeds (at most `SHOWN`),
and one JSON object; the exit code is 1 if anything was violated, or if a broken rule was not noticed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SHOWN = 3
MOST_SCHEDULES = 300
"""Schedules in which a broken rule must be noticed."""
_CHUNK = 20


def main() -> int:
    parser = argparse.ArgumentParser(description="Try seeded schedules of a simulated run.")
    parser.add_argument("schedules", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one seed alone, with its history")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--broken-rules", action="store_true", help="break every rule in turn, until that is noticed")
    options = parser.parse_args()
    if options.broken_rules:
        return break_rules(options.jobs)
    if options.seed is not None:
        return show(options.seed)
    return try_schedules(range(options.first, options.first + options.schedules), options.jobs)


def show(seed: int) -> int:
    """Print the history of one seed."""
    from simulation.scenario import draw_scenario
    from simulation.schedule import format_outcome, run_schedule

    outcome = run_schedule(draw_scenario(seed), is_traced=True)
    print("\n".join(outcome.history))
    print(format_outcome(replace(outcome, history=())))
    print(f"seed {seed}: {len(outcome.violations)} violations after {outcome.seconds:.0f} s")
    return 1 if outcome.violations else 0


def try_schedules(seeds: range, jobs: int) -> int:
    """Run the schedules of all seeds on `jobs` processes; print the report."""
    from simulation.schedule import Outcome, format_outcome, shrink

    began = time.perf_counter()
    failed: list[Outcome] = []
    faults: Counter[str] = Counter()
    virtual_s = 0.0
    for outcome in _run_all(seeds, jobs):
        faults.update(fault.kind for fault in outcome.injected)
        virtual_s += outcome.seconds
        if outcome.violations:
            failed.append(outcome)
    elapsed_s = time.perf_counter() - began
    for kind, count in sorted(faults.items()):
        print(f"{kind:20} {count:7}")
    print(f"{'schedules':20} {len(seeds):7}  {virtual_s / 3600:.0f} simulated hours in {elapsed_s:.0f} s")
    print(f"{'violations':20} {len(failed):7}  {' '.join(str(outcome.scenario.seed) for outcome in failed[:50])}")
    reasons = Counter(outcome.violations[0].partition(":")[0] for outcome in failed)
    for outcome in failed[:SHOWN]:
        print(format_outcome(shrink(outcome)))
    for reason, count in reasons.most_common():
        print(f"{count:7} × {reason}")
    print(json.dumps({"schedules": len(seeds), "faults": faults.total(), "violations": len(failed)}))
    return 1 if failed else 0


def break_rules(jobs: int) -> int:
    """Break each rule of the programs, and count the schedules until that is noticed; print the table."""
    from simulation.broken_rules import BROKEN_RULES

    print(f"{'rule':58} {'schedules':>9}  noticed by")
    unnoticed = 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        found = pool.map(_break_rule, range(len(BROKEN_RULES)))
        for rule, (schedules, violation) in zip(BROKEN_RULES, found, strict=True):
            unnoticed += not violation
            print(f"{rule.name:58} {schedules:9}  {violation or 'nothing'}")
    print(json.dumps({"broken_rules": len(BROKEN_RULES), "unnoticed": unnoticed}))
    return 1 if unnoticed else 0


def _break_rule(number: int) -> tuple[int, str]:
    """(schedules that were tried, the first violation; empty if there was none)."""
    from simulation.broken_rules import BROKEN_RULES
    from simulation.schedule import run_schedule

    rule = BROKEN_RULES[number]
    with rule.break_it():
        for seed in range(MOST_SCHEDULES):
            if violations := run_schedule(rule.draw_scenario(seed)).violations:
                return seed + 1, violations[0]
    return MOST_SCHEDULES, ""


def _run_all(seeds: range, jobs: int) -> Iterator[object]:
    # Forked: each process has what this one has imported.
    import simulation.schedule  # noqa: F401

    gc.freeze()
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(_run_seed, seeds, chunksize=_CHUNK)


def _run_seed(seed: int) -> object:
    from simulation.scenario import draw_scenario
    from simulation.schedule import run_schedule

    return run_schedule(draw_scenario(seed))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of a schedule
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    parts = ("lab", "tests/support", "services/rollout", "libs/sandbox", "cli")
    sys.path[:0] = [str(REPOSITORY / part) for part in parts]
    sys.exit(main())
