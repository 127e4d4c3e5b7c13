"""`make gpu-check`: shows on a machine with GPUs what cannot be shown without one, stage by stage.

    gpu_check [--model FOLDER] [--out FILE] [STAGE …]     all stages by default, in any order
    gpu_check --list                                      the stages, and what each shows

Each stage is a process of its own with a limit of eight minutes. It prints one line of JSON: what was checked against
which bound, what was measured, the device and the commit. Without a GPU a stage runs its part for CPUs, or says what it
lacks. Lines are appended to runs/gpu-check/results.jsonl, and with them a table is printed. The exit code is 1 if a
stage failed. Runs in the environment of the cli; docs/operate/gpu.md explains the stages.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from findings import Findings, SkipStage
from rich.console import Console
from rich.table import Table
from stages import STAGES

from forage_cli.local.nvidia import list_gpus
from forage_runtime.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "runs/gpu-check"
LIMIT_S = 480
"""Limit of one stage, so that all fit where a machine is lent for minutes."""


def main() -> int:
    summary, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(prog="gpu_check", description=summary, epilog=rest, formatter_class=_Formatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"some of {', '.join(STAGES)}; all by default")
    parser.add_argument("--model", type=Path, help="folder of a model of 0.5 to 3B parameters for the training stage")
    parser.add_argument("--out", type=Path, default=FOLDER / "results.jsonl", help="file of lines")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="limit of a stage; %(default)s by default")
    parser.add_argument("--list", action="store_true", help="list the stages")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # in this process, without a limit
    options = parser.parse_args()
    if unknown := [name for name in options.stages if name not in STAGES]:
        parser.error(f"{unknown[0]} is not a stage, expected some of {', '.join(STAGES)}")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} has no config.json, expected a Hugging Face model folder")
    if options.list:
        for name, stage in STAGES.items():
            print(f"{name:<12} {str(stage.__doc__).splitlines()[0]}")
        return 0
    if options.inside:
        run_inside(options.stages[0], options.model)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stage ends with this process, however that ends
    for folder in (FOLDER, options.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    lock = (FOLDER / "lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"another gpu-check runs in {FOLDER}: wait until it has ended")
    lines = []
    for name in options.stages or STAGES:
        lines.append(run_stage(name, options.model, options.limit_s))
        print(json.dumps(lines[-1]), flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    print_table(lines)
    return int(any(line["status"] == "failed" for line in lines))


def run_inside(name: str, model: Path | None) -> None:
    """Run a stage in this process; its findings are the last line of stdout."""
    findings = Findings(model)
    try:
        STAGES[name].run(findings)
    except SkipStage as skip:
        findings.skip(str(skip))
    print(f"\n{json.dumps(findings.summarize())}", flush=True)


def run_stage(name: str, model: Path | None, limit_s: float) -> dict[str, Any]:
    """Run a stage in a process group of its own, which ends with it."""
    log = FOLDER / f"{name}.log"
    print(
        f"gpu-check: {name}, at most {limit_s / 60:.3g} minutes (log: {log.relative_to(REPOSITORY)}) …", file=sys.stderr
    )
    command = [sys.executable, str(Path(__file__).parent), "--inside", name]
    command += ["--model", str(model)] if model is not None else []
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            encoding="utf-8",
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            _end_group(process)
    last = (output.strip().splitlines() or [""])[-1]
    found: dict[str, Any]
    if process.returncode == 0 and last.startswith("{"):
        found = json.loads(last)
    else:
        timed_out = time.monotonic() - began >= limit_s
        tail = (log.read_text(errors="replace", encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        why = f"longer than {limit_s:g} s" if timed_out else f"exit status {process.returncode}: {tail}"
        found = {
            "status": "failed",
            "reason": f"{why}; see {log.relative_to(REPOSITORY)}",
            "checks": {},
            "measured": {},
        }
    return {
        "stage": name,
        "status": found.pop("status"),
        "reason": found.pop("reason"),
        "seconds": round(time.monotonic() - began, 1),
        "device": _name_devices(),
        "commit": _read_commit(),
        "date": time.strftime("%Y-%m-%d"),
        **found,
    }


def _name_devices() -> str:
    try:
        products = Counter(gpu.product for gpu in list_gpus())
    except UserError as error:
        return str(error)
    return ", ".join(f"{count} x {product}" for product, count in products.items()) or "no GPU"


def _end_group(process: subprocess.Popen[str]) -> None:
    """End what the stage has started, the services of its runs included, and wait for the stage."""
    for number, patience_s in ((signal.SIGTERM, 40), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and _is_alive(process):
            time.sleep(0.2)  # wait: until the group has ended
    process.wait()


def _is_alive(process: subprocess.Popen[str]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_commit() -> str:
    """The short hash of the commit, with a + if files differ from it; empty outside a Git checkout."""
    git = ["git", "-C", str(REPOSITORY)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, encoding="utf-8")
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, encoding="utf-8")
    return done.stdout.strip() + ("+" if changed.stdout.strip() else "")


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print a row for each stage: on stderr, where no program reads it."""
    console = Console(stderr=True)
    table = Table(title=f"gpu-check on {lines[0]['device']}, commit {lines[0]['commit']}")
    for column in ("stage", "result", "seconds", "what"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for line in lines:
        failed = [
            f"{name} {one['value']} (bound {one['bound']})" for name, one in line["checks"].items() if not one["ok"]
        ]
        passed = [f"{len(line['checks']) - len(failed)} checks passed"] if line["checks"] else []
        colour = {"passed": "green", "failed": "red"}.get(line["status"], "yellow")
        what = "; ".join([*failed, *passed, *filter(None, [line["reason"]])])
        table.add_row(line["stage"], f"[{colour}]{line['status']}[/]", f"{line['seconds']:.0f}", what)
    console.print(table)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows the paragraphs of the help as they are written."""


if __name__ == "__main__":
    sys.exit(main())
