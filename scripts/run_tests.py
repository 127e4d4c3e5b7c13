"""Runs the tests, each folder in the environment of its service, and prints totals from pytest's own reports.

A test is in `tests/<kind>/<part>/`. The kind says what it costs and decides when it runs:

    unit        one process: no network, no other process, no sleep               `make test`
    component   one service, or one real server or engine                         `make test`
    e2e         a short demo whose trainer is killed                              `make test`
    system      several services                                                  `make test-long`
    nightly     whole recipes, chaos, many seeds, fuzz, tools, browsers, charts   `make test-long`

The part decides in which environment it runs: that of the service before the first underscore. A test file elsewhere is
an error, because nothing would run it. Vitest over the console's front end belongs to `unit`.

Long folders run in pieces of similar seconds, by what tests/seconds.json recorded (`--record` renews it). More pieces
run than there are cores, because tests wait half of their time. Systems run one at a time, beside other kinds.

A case of `system` or `nightly` that failed runs once more, alone: if it passes then it is counted as unstable, and more
than two unstable cases fail the run. Cases of the other kinds are never repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
FRONT_END = REPOSITORY / "services/console/web/src"
REPORTS = REPOSITORY / ".cache/tests"
SECONDS = TESTS / "seconds.json"
QUICK = ("unit", "component", "e2e")
LONG = ("system", "nightly")
ENVIRONMENT = {
    **dict.fromkeys(("probe", "queue", "records", "runtime", "scripts", "trajectory"), "cli"),
    **dict.fromkeys(("models", "weights"), "trainer"),
    "sandbox": "reward",
}
"""Parts without their own environment → the environment they use."""
PIECE_S = 120.0
"""Recorded seconds above which the rest of a folder becomes a piece of its own; each piece pays the imports again."""
LEAST_S = 0.5
"""Seconds of a file that are worth recording."""
UNKNOWN_S = {"e2e": 100.0, "system": 60.0, "nightly": 20.0}
"""Seconds of a file without a record, by kind; LEAST_S for the others."""
MEMORY_PER_PIECE = 3 << 30
MAX_UNSTABLE = 2
MAX_REPEATED = 10
"""Failures above which none is repeated: so many have a cause."""
LEFTOVERS_S = 30.0
"""Time that processes of ended tests have to end."""
SLOWEST = 20
_NO_TESTS = 5  # pytest's exit code if no test was selected


@dataclass(frozen=True)
class Case:
    """One test as pytest reported it."""

    id: str
    """What pytest is called with to run it alone."""
    seconds: float
    outcome: str
    """passed, failed, skipped or unstable"""
    reason: str = ""
    """Why it was skipped."""

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


@dataclass
class Job:
    """One pytest run over some files of a folder of tests."""

    folder: Path
    files: Sequence[Path] = ()
    piece: str = ""
    """Such as 2/3; empty: the whole folder."""
    expected_s: float = 0.0
    status: int = 0
    seconds: float = 0.0
    cases: list[Case] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.folder.relative_to(TESTS))

    @property
    def title(self) -> str:
        return f"{self.name} {self.piece}".strip()

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_system(self) -> bool:
        """Whether it starts several services, which must not run beside another job that does."""
        return self.kind in ("e2e", "system") or self.folder.name.endswith("_chaos")

    @property
    def environment(self) -> str:
        service = self.folder.name.partition("_")[0]
        return ENVIRONMENT.get(service, service)

    @property
    def report(self) -> Path:
        return REPORTS / f"{self.title.replace('/', '-').replace(' ', '-')}.xml"

    @property
    def failed(self) -> list[Case]:
        return [case for case in self.cases if case.outcome == "failed"]

    def make_command(self, options: Sequence[str]) -> list[str]:
        targets = [str(file.relative_to(REPOSITORY)) for file in self.files]
        return self.make_pytest_command(f"--junitxml={self.report}", "-ojunit_family=xunit1", *options, *targets)

    def make_pytest_command(self, *arguments: str) -> list[str]:
        return [str(REPOSITORY / ".venvs" / self.environment / "bin/python"), "-m", "pytest", *arguments]

    def run(self, options: Sequence[str]) -> str:
        """Run the tests and read the report; returns the output."""
        self.report.unlink(missing_ok=True)
        started = time.monotonic()
        ended = _run(self.make_command(options))
        self.seconds = time.monotonic() - started
        self.status = 0 if ended.returncode == _NO_TESTS else ended.returncode
        if self.report.exists():
            self.cases = list(read_cases(self.report))
        elif not self.status:  # a test ended the process, or another program took its place
            self.status = 1
            return f"{ended.stdout}\n{self.title} ended without a report, as if nothing had failed\n"
        return ended.stdout

    def repeat_failed(self) -> None:
        """Run each failed case once more, alone; one that passes now is unstable."""
        self.cases = [
            replace(case, outcome="unstable") if case.outcome == "failed" and self._passes(case) else case
            for case in self.cases
        ]
        if self.status == 1 and not self.failed:
            self.status = 0

    def _passes(self, case: Case) -> bool:
        return _run(self.make_pytest_command(case.id)).returncode == 0


class FrontEndJob(Job):
    """Vitest over the front end of the console."""

    name = "unit/console_web"
    environment = "node"

    def make_command(self, options: Sequence[str]) -> list[str]:
        return [str(REPOSITORY / "scripts/console.sh"), "test", str(self.report)]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with _children:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            encoding="utf-8",
        )
        _runs.add(process.pid)
    output, _ = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output)


_children = threading.Lock()
_runs: set[int] = set()
"""Processes of pytest; the other children of this process are orphans of tests."""


def _environment() -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # An EncodingWarning of our modules is an error in tests: see filterwarnings in pyproject.toml.
    defaults["PYTHONWARNDEFAULTENCODING"] = "1"
    # Tests start many processes. Without bytecode each compiles torch and its like anew: 9 CPU seconds a trainer.
    return {name: value for name, value in (defaults | os.environ).items() if name != "PYTHONDONTWRITEBYTECODE"}


def read_cases(report: Path) -> Iterable[Case]:
    """Read the cases of a JUnit report."""
    for element in ElementTree.parse(report).getroot().iter("testcase"):
        file, classes = element.get("file", ""), element.get("classname", "")
        module = file.removesuffix(".py").replace("/", ".")
        inner = classes.removeprefix(module).lstrip(".").replace(".", "::") if file else classes
        outcome, reason = "passed", ""
        if element.find("failure") is not None or element.find("error") is not None:
            outcome = "failed"
        elif (skipped := element.find("skipped")) is not None:
            outcome, reason = "skipped", skipped.get("message", "")
        parts = [part for part in (file, inner, element.get("name", "")) if part]
        yield Case("::".join(parts), float(element.get("time", 0)), outcome, reason)


def list_test_files(kinds: Sequence[str]) -> list[Path]:
    return sorted(file for kind in kinds for file in (TESTS / kind).rglob("test_*.py"))


def find_misplaced_tests() -> list[str]:
    """List the test files that no kind and part would run."""
    misplaced = []
    for file in sorted(TESTS.rglob("test_*.py")):
        parts = file.relative_to(TESTS).parts
        has_kind = len(parts) >= 3 and parts[0] in QUICK + LONG
        if not has_kind or not (REPOSITORY / ".venvs" / Job(TESTS / parts[0] / parts[1]).environment).is_dir():
            misplaced.append(str(file.relative_to(REPOSITORY)))
    return misplaced


def read_seconds() -> dict[str, float]:
    """Read the recorded seconds of test files: path below tests/ → seconds."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    return seconds


def expect_seconds(files: Sequence[Path]) -> list[tuple[Path, float]]:
    """Pair each file with its recorded seconds, or those of its kind."""
    seconds = read_seconds()
    names = {file: str(file.relative_to(TESTS)) for file in files}
    return [(file, seconds.get(name, UNKNOWN_S.get(name.partition("/")[0], LEAST_S))) for file, name in names.items()]


def record_seconds(jobs: Sequence[Job]) -> None:
    """Renew the records of the files that these jobs ran, and forget those of files that are gone."""
    ran: defaultdict[str, float] = defaultdict(float)
    for case in (case for job in jobs for case in job.cases if case.file.startswith("tests/")):
        ran[case.file.removeprefix("tests/")] += case.seconds
    merged = {name: value for name, value in read_seconds().items() if (TESTS / name).exists() and name not in ran}
    merged |= {name: round(value, 1) for name, value in ran.items() if value >= LEAST_S}
    SECONDS.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n", encoding="utf-8")


def list_jobs(files: Sequence[Path], with_front_end: bool = False) -> list[Job]:
    """List the jobs for these test files, the longest first: one for every folder and PIECE_S recorded seconds."""
    folders: dict[Path, list[tuple[Path, float]]] = {}
    for file, expected in expect_seconds(files):
        kind, part, *_ = file.relative_to(TESTS).parts
        folders.setdefault(TESTS / kind / part, []).append((file, expected))
    jobs: list[Job] = []
    for folder, members in folders.items():
        pieces = split_evenly(members, max(1, round(sum(s for _, s in members) / PIECE_S)))
        for number, piece in enumerate(pieces, 1):
            jobs.append(
                Job(
                    folder,
                    files=[file for file, _ in piece],
                    piece=f"{number}/{len(pieces)}" if len(pieces) > 1 else "",
                    expected_s=sum(expected for _, expected in piece),
                )
            )
    if with_front_end:
        jobs.append(FrontEndJob(FRONT_END, expected_s=PIECE_S / 2))
    return sorted(jobs, key=lambda job: -job.expected_s)


def split_evenly(members: Sequence[tuple[Path, float]], count: int) -> list[list[tuple[Path, float]]]:
    """Split files with their seconds into parts of similar sums: the longest first, each to the least part so far."""
    parts: list[list[tuple[Path, float]]] = [[] for _ in range(count)]
    for member in sorted(members, key=lambda member: (-member[1], member[0])):
        min(parts, key=lambda part: sum(seconds for _, seconds in part)).append(member)
    return [sorted(part) for part in parts if part]


def select_shard(files: Sequence[Path], shard: str) -> list[Path]:
    """Select a part of the files, such as 2/4: the parts have similar recorded seconds and no file in common."""
    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise SystemExit(f"run_tests: SHARD is '{shard}', expected NUMBER/COUNT such as 2/4")
    shards = split_evenly(expect_seconds(files), int(count))
    return [file for file, _ in shards[int(number) - 1]] if int(number) <= len(shards) else []


def count_workers() -> int:
    """Count the jobs that run side by side: twice the cores, because tests wait, and no more than memory allows."""
    fitting = psutil.virtual_memory().available // MEMORY_PER_PIECE
    return int(max(1, min(2 * (os.cpu_count() or 1), fitting)))


def run_jobs(jobs: Sequence[Job], workers: int, run: Callable[[Job], None]) -> None:
    """Run jobs in parallel, but never two systems: while one is running, a worker takes another kind."""
    systems = deque(job for job in jobs if job.is_system)
    others = deque(job for job in jobs if not job.is_system)
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


class Progress:
    """Prints each job as it ends, with its output where something failed."""

    def __init__(self, count: int) -> None:
        self._count, self._ended, self._lock = count, 0, threading.Lock()

    def report(self, job: Job, output: str) -> None:
        with self._lock:
            self._ended += 1
            outcomes = Counter(case.outcome for case in job.cases)
            counts = ", ".join(f"{outcomes[name]} {name}" for name in sorted(outcomes)) or "no tests"
            print(
                f"[{self._ended}/{self._count}] {job.title} ({job.environment}): {counts}, {job.seconds:.0f} s",
                flush=True,
            )
            if job.status:
                print(output, flush=True)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, so that those that tests leave behind are found (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        threading.Thread(target=_reap_orphans, daemon=True).start()


def _reap_orphans() -> None:
    """Collect orphans that ended, as init would: tests wait until a process that they killed is gone."""
    while True:
        time.sleep(0.2)
        with _children, contextlib.suppress(psutil.Error, ChildProcessError):
            for child in psutil.Process().children():
                if child.pid not in _runs and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)


def end_leftovers() -> list[str]:
    """Give processes that tests left behind time to end, and kill the rest; returns their command lines."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=LEFTOVERS_S)
    left = []
    for process in alive:
        try:
            left.append(" ".join(process.cmdline())[:200] or process.name())
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=LEFTOVERS_S)
    return left


def summarize(jobs: Sequence[Job], leftovers: Sequence[str] = ()) -> int:
    """Print the time of each job, the slowest cases, skipped and failed ones, and totals; return the exit status."""
    cases = [case for job in jobs for case in job.cases]
    for job in sorted(jobs, key=lambda job: -job.seconds):
        print(f"{job.seconds:7.1f} s  {job.title}  {len(job.cases)} tests")
    slowest = sorted(cases, key=lambda case: -case.seconds)[:SLOWEST]
    print(f"the slowest {len(slowest)}:")
    for case in slowest:
        print(f"{case.seconds:7.1f} s  {case.id}")
    for reason, number in Counter(case.reason for case in cases if case.outcome == "skipped").most_common():
        print(f"skipped {number}: {reason}")
    count: Counter[str] = Counter()
    for job in jobs:
        for case in job.cases:
            count["passed" if case.outcome == "unstable" else case.outcome] += 1
            if case.outcome in ("failed", "unstable"):
                print(f"{case.outcome}: {case.id}")
        if job.status and not job.failed:
            count["failed"] += 1
            print(f"failed: {job.title} ended with exit code {job.status}")
    for command in leftovers:
        count["failed"] += 1
        print(f"failed: left behind by a test, and killed: {command}")
    unstable = sum(case.outcome == "unstable" for case in cases)
    if unstable:
        print(f"unstable: {unstable} (at most {MAX_UNSTABLE} are allowed)")
    print(", ".join(f"{count[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")))
    return 1 if count["failed"] or unstable > MAX_UNSTABLE else 0


def repeat_failed(jobs: Sequence[Job]) -> None:
    """Repeat the failed cases of the kinds whose services share the machine with others."""
    repeated = [job for job in jobs if job.kind in LONG and job.failed]
    if sum(len(job.failed) for job in repeated) <= MAX_REPEATED:
        for job in repeated:
            job.repeat_failed()


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into those of this command and, after `--`, those of pytest."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="run_tests.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="+", choices=("quick", "long", *QUICK, *LONG), help="kinds; quick and long are several"
    )
    parser.add_argument(
        "--shard", metavar="N/COUNT", default="", help="run one of COUNT parts of similar recorded seconds"
    )
    parser.add_argument(
        "--changed", metavar="COMMIT", default="", help="only folders that a change since COMMIT touches"
    )
    parser.add_argument("--record", action="store_true", help="write the seconds of each file to tests/seconds.json")
    return parser.parse_args(arguments[:split]), list(arguments[split + 1 :])


def main(arguments: Sequence[str]) -> int:
    chosen, options = parse(arguments)
    kinds = [kind for name in chosen.kinds for kind in {"quick": QUICK, "long": LONG}.get(name, (name,))]
    if misplaced := find_misplaced_tests():
        print(f"run_tests: no kind runs {', '.join(misplaced)}: move them to tests/<kind>/<service>/", file=sys.stderr)
        return 2
    files = list_test_files(kinds)
    with_front_end = "unit" in kinds and not options
    if chosen.changed:
        from changed_tests import select_changed

        files, is_front_end_changed = select_changed(files, chosen.changed)
        with_front_end = with_front_end and is_front_end_changed
    if chosen.shard:
        files = select_shard(files, chosen.shard)
    REPORTS.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    jobs = list_jobs(files, with_front_end)
    progress, started = Progress(len(jobs)), time.monotonic()
    run_jobs(jobs, count_workers(), lambda job: progress.report(job, job.run(options)))
    repeat_failed(jobs)
    leftovers = end_leftovers()
    if chosen.record:
        record_seconds(jobs)
    _print_cost(time.monotonic() - started)
    return summarize(jobs, leftovers)


def _print_cost(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = os.cpu_count() or 1
    busy = (used.ru_utime + used.ru_stime) / (seconds * cores)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{seconds / 60:.1f} minutes, {busy:.0%} of {cores} cores, load of the machine {load}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
