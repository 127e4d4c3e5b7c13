"""Sends hostile inputs to every wire and every reader of files, and reports what they did.

    fuzz.py [--inputs 100000] [--seed 0] [--wires "reward console"] [--jobs 2] [--minutes 10] [--limit-s 30]
    fuzz.py --replay FILE        send one failing input again
    fuzz.py --list               the wires

Run it in the environment of the console, which has what generates requests. The inputs are divided evenly among the
wires; the same seed makes the same ones. It shows the progress, then prints a table, and as its last line one JSON
object. Failing inputs are saved, and their files named. The exit code is 1 if a process crashed, an answer was an
internal error, something hung, or memory grew too much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FAILURES = REPOSITORY / ".cache/fuzz/failures"
sys.path[:0] = [str(REPOSITORY / "lab"), str(REPOSITORY / "tests/support")]


def main() -> int:
    from fuzz import targets
    from fuzz.report import Display, summarize
    from fuzz.wires import WIRES

    parser = argparse.ArgumentParser(description="Fuzz every wire.")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wires", default="", help="separated by spaces or commas; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="wires at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time after which no more inputs are sent")
    parser.add_argument("--limit-s", type=float, default=30.0, help="time for an answer; more on a busy machine")
    parser.add_argument("--failures", type=Path, default=FAILURES, help="folder for failing inputs")
    parser.add_argument("--replay", type=Path, help="file of a failing input")
    parser.add_argument("--list", action="store_true", help="list the wires")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets.LIMIT_S = options.limit_s
    if options.list:
        print("\n".join(WIRES))
        return 0
    if options.replay:
        return _replay(options.replay)
    if options.worker:
        return _work(options.worker, options.inputs, options.seed, options.failures, options.until)
    wires = options.wires.replace(",", " ").split() or list(WIRES)
    if unknown := set(wires) - set(WIRES):
        parser.error(f"unknown wires {', '.join(sorted(unknown))}; known: {', '.join(WIRES)}")
    shutil.rmtree(options.failures, ignore_errors=True)
    display = Display(wires, options.inputs)
    shares = {wire: options.inputs // len(wires) + (n < options.inputs % len(wires)) for n, wire in enumerate(wires)}

    until = time.time() + 60 * options.minutes

    def run(wire: str) -> None:
        command = [sys.executable, __file__, "--worker", wire, "--inputs", str(shares[wire])]
        command += ["--seed", str(options.seed), "--failures", str(options.failures)]
        command += ["--until", str(until), "--limit-s", str(options.limit_s)]
        # What generates requests goes through sets of texts, whose order depends on the seed of their hashes.
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        worker = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        with workers_lock:
            workers.append(worker)
        assert worker.stdout is not None
        for line in worker.stdout:
            display.update(wire, json.loads(line))
        assert worker.stderr is not None
        problem = worker.stderr.read()
        if worker.wait():
            display.fail(wire, problem)

    workers: list[subprocess.Popen[str]] = []
    workers_lock = threading.Lock()
    try:
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            for done in [pool.submit(run, wire) for wire in wires]:
                done.result()
    finally:
        for worker in workers:
            worker.terminate()
    display.close()
    table, result = summarize(display.rows, options.seed)
    print(table)
    print(json.dumps(result))
    return 0 if result["clean"] else 1


def _work(wire: str, count: int, seed: int, failures: Path, until: float) -> int:
    """Fuzz one wire; prints its result so far every second, and the whole at the end, as lines of JSON."""
    from fuzz.play import Play, Result
    from fuzz.wires import WIRES

    def report(result: Result) -> None:
        print(json.dumps(result.to_row()), flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends what it has started
    with tempfile.TemporaryDirectory(prefix="forage-fuzz-") as folder:
        chosen = WIRES[wire]
        play = Play(wire, chosen.make(Path(folder)), chosen.concurrency, failures, report, until)
        report(asyncio.run(play.run(chosen.generate(seed), count)))
    return 0


def _replay(file: Path) -> int:
    """Send the input of a file to a target of its own; prints what became of it."""
    from fuzz.inputs import Input
    from fuzz.play import Play
    from fuzz.wires import WIRES

    one = Input.load(file)
    with tempfile.TemporaryDirectory(prefix="forage-fuzz-") as folder:
        play = Play(one.wire, WIRES[one.wire].make(Path(folder)), 1, FAILURES, lambda result: None)
        verdict = asyncio.run(play.send_one(one))
    print(json.dumps({"wire": one.wire, "call": one.call, "outcome": verdict.outcome, "fault": verdict.fault}))
    if verdict.detail:
        print(verdict.detail, file=sys.stderr)
    return 1 if verdict.fault else 0


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the services would compile their modules at every start
    sys.exit(main())
