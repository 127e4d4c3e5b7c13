"""Runs the tests, each folder in the environment of its service, and prints totals from pytest's own reports.

    run_tests.py quick                    the kinds of `make test`
    run_tests.py long                     the kinds that `make test-all` adds
    run_tests.py unit e2e                 these kinds
    run_tests.py unit -- -k streams       options after `--` go to pytest

A test is in `tests/<kind>/<part>/`. The kind decides when it runs; the part decides in which environment: that of the
service before the first underscore. A test file elsewhere is an error, because nothing would run it. The tests of the
console's front end, beside its sources, run with the kind `unit`, unless there are options for pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
FRONT_END = REPOSITORY / "services/console/web/src"
REPORTS = REPOSITORY / ".cache/tests"
QUICK = ("unit", "contract", "e2e")
LONG = ("long", "deploy", "browser", "system", "chaos")
SYSTEMS = ("e2e", "system", "chaos")
"""Kinds that start several services and often wait for them: one of their folders runs at a time, beside others."""
ENVIRONMENT = {
    **dict.fromkeys(("common", "probe", "records", "scripts"), "cli"),
    **dict.fromkeys(("models", "policies"), "trainer"),
    "isolation": "reward",
}
"""Parts without their own environment → the environment they use."""
SLOWEST = 20
_NO_TESTS = 5  # pytest's exit code if no test was selected


@dataclass
class Job:
    """One pytest run over one folder of tests."""

    folder: Path
    status: int = 0
    seconds: float = 0.0
    cases: list[tuple[float, str, str]] = field(default_factory=list)
    """(seconds, name, outcome: passed, failed or skipped) of every test."""

    @property
    def name(self) -> str:
        return str(self.folder.relative_to(TESTS))

    @property
    def starts_system(self) -> bool:
        return self.name.split("/")[0] in SYSTEMS

    @property
    def environment(self) -> str:
        service = self.folder.name.partition("_")[0]
        return ENVIRONMENT.get(service, service)

    @property
    def report(self) -> Path:
        return REPORTS / f"{self.name.replace('/', '-')}.xml"

    def make_command(self, options: Sequence[str]) -> list[str]:
        python = REPOSITORY / ".venvs" / self.environment / "bin/python"
        return [str(python), "-m", "pytest", f"--junitxml={self.report}", *options, str(self.folder)]

    def run(self, options: Sequence[str]) -> None:
        """Run the tests, read the report, and print the output at once, so that parallel runs do not mix theirs."""
        self.report.unlink(missing_ok=True)
        started = time.monotonic()
        ended = subprocess.run(
            self.make_command(options),
            cwd=REPOSITORY,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.seconds = time.monotonic() - started
        self.status = 0 if ended.returncode == _NO_TESTS else ended.returncode
        if self.report.exists():
            self.cases = list(_read_cases(self.report))
        with _print_lock:
            print(f"── {self.name} ({self.environment}, {self.seconds:.0f} s)\n{ended.stdout}", end="", flush=True)


class FrontEndJob(Job):
    """Vitest over the front end of the console."""

    name = "unit/console_web"
    environment = "node"

    def make_command(self, options: Sequence[str]) -> list[str]:
        return [str(REPOSITORY / "scripts/console.sh"), "test", str(self.report)]


_print_lock = threading.Lock()


def _environment() -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Tests start many processes. Without bytecode each compiles torch and its like anew: 9 CPU seconds a trainer.
    return {name: value for name, value in (defaults | os.environ).items() if name != "PYTHONDONTWRITEBYTECODE"}


def _read_cases(report: Path) -> Iterable[tuple[float, str, str]]:
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None:
            outcome = "skipped"
        yield float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}", outcome


def find_misplaced_tests() -> list[str]:
    """List the test files that no kind and part would run."""
    misplaced = []
    for file in sorted(TESTS.rglob("test_*.py")):
        parts = file.relative_to(TESTS).parts
        has_kind = len(parts) >= 3 and parts[0] in QUICK + LONG
        if not has_kind or not (REPOSITORY / ".venvs" / Job(TESTS / parts[0] / parts[1]).environment).is_dir():
            misplaced.append(str(file.relative_to(REPOSITORY)))
    return misplaced


def list_jobs(kinds: Sequence[str]) -> list[Job]:
    """List one job for every folder of these kinds that contains tests; trainer and rollout, the longest, first."""
    folders = (folder for kind in kinds for folder in sorted((TESTS / kind).glob("*"), reverse=True) if folder.is_dir())
    jobs = [Job(folder) for folder in folders if any(folder.rglob("test_*.py"))]
    return [*jobs, FrontEndJob(FRONT_END)] if "unit" in kinds else jobs


def run_jobs(jobs: Sequence[Job], workers: int, run: Callable[[Job], None]) -> None:
    """Run jobs in parallel, but never two that start systems: while one is running, a worker takes another kind."""
    systems = deque(job for job in jobs if job.starts_system)
    others = deque(job for job in jobs if not job.starts_system)
    system, choice = threading.Lock(), threading.Lock()

    def work() -> None:
        while True:
            with choice:
                takes_system = bool(systems) and system.acquire(blocking=not others)
                if not takes_system and not others:
                    return
                job = (systems if takes_system else others).popleft()
            try:
                run(job)
            finally:
                if takes_system:
                    system.release()

    with ThreadPoolExecutor(workers) as pool:
        for ended in [pool.submit(work) for _ in range(workers)]:
            ended.result()


def main(arguments: Sequence[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:split], arguments[split + 1 :]
    kinds = [kind for name in names for kind in {"quick": QUICK, "long": LONG}.get(name, (name,))]
    unknown = [kind for kind in kinds if kind not in QUICK + LONG]
    if unknown or not kinds:
        expected = ", ".join(("quick", "long", *QUICK, *LONG))
        print(f"run_tests: expected some of {expected}, not {' '.join(unknown) or 'nothing'}", file=sys.stderr)
        return 2
    if misplaced := find_misplaced_tests():
        print(f"run_tests: no kind runs {', '.join(misplaced)}: move them to tests/<kind>/<service>/", file=sys.stderr)
        return 2
    REPORTS.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in list_jobs(kinds) if not options or not isinstance(job, FrontEndJob)]
    run_jobs(jobs, max(1, min(4, os.cpu_count() or 1)), lambda job: job.run(options))
    return summarize(jobs)


def summarize(jobs: Sequence[Job]) -> int:
    """Print the time of each job, the slowest tests, failures and totals; return the exit status."""
    for job in sorted(jobs, key=lambda job: -job.seconds):
        print(f"{job.seconds:7.1f} s  {job.name}  {len(job.cases)} tests")
    slowest = sorted((case for job in jobs for case in job.cases), reverse=True)[:SLOWEST]
    print(f"the slowest {len(slowest)}:")
    for seconds, name, _ in slowest:
        print(f"{seconds:7.1f} s  {name}")
    count = {outcome: 0 for outcome in ("passed", "failed", "skipped")}
    for job in jobs:
        for _, name, outcome in job.cases:
            count[outcome] += 1
            if outcome == "failed":
                print(f"failed: {name} ({job.name})")
        if job.status and not any(outcome == "failed" for _, _, outcome in job.cases):
            count["failed"] += 1
            print(f"failed: {job.name} ended with exit code {job.status}")
    print(", ".join(f"{number} {outcome}" for outcome, number in count.items()))
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
