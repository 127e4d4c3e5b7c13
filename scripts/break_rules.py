"""Break rules of the product one at a time, in a copy, and see whether the tests of `make test` notice."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from check_structure import list_packages
from run_tests import ENVIRONMENT

HELP = """A test suite is worth what it notices. Each rule is one sentence that holds for the product, such as "a
group with too few valid rows trains nothing". Its break is a small edit of the code. The script copies the packages,
makes one edit after the other, and runs the test files that should notice; they import the copy. Without any break
these files must pass, or else a failure proves nothing: they are run so first. What passed is remembered in
.cache/break_rules.json for as long as neither packages nor tests change.

The rules are in scripts/broken_rules/GROUP.txt:

    [test_estimators.py probe/test_metrics.py]        the test files that should notice the rules after this line,
                                                      by name, or part and name where several parts have the name;
                                                      they are found in tests/unit and tests/component
    epsilon is added to the deviation of a group      the rule
      services/trainer/forage_trainer/.../groups.py   a file, then what takes the place of what
    - centered / (std + EPSILON)                      in it, like in a diff; a rule may have several edits
    + centered / (std**2 + EPSILON).sqrt()

A rule that is NOT NOTICED needs a test, or is none. A rule whose text is gone must be written anew: the script names
it and runs nothing. Choose the fastest test files that should notice: a run ends at its first failure.
"""
EXAMPLES = """examples:
  break_rules.py                              all, in a quarter of an hour on two cores
  break_rules.py semantics "a prompt"         a group, and the rules whose name begins so
  break_rules.py --repository ../before       the code and tests of another clone, with these rules
exit code: 0 all noticed, 1 some not, 2 a rule or a test file is not as the rules say
"""
REPOSITORY = Path(__file__).resolve().parents[1]
RULES = Path(__file__).resolve().parent / "broken_rules"
KINDS = ("unit", "component", "contract")
"""Kinds of tests that notice; `contract` was the name of `component`."""
LIBRARIES = {"trainer": ("torch", "transformers", "tensordict", "verl.trainer.ppo.core_algos")}
"""What the tests of an environment import for seconds."""
_FAILED, _PASSED = 1, 0
_SHOWN = 110


@dataclass(frozen=True)
class Edit:
    """file: below the repository; every `old` in it becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Rule:
    """A rule, how it is broken, and the names of the test files that should notice."""

    group: str
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """How the rules of a group are tried.

    Attributes:
        timeout_s: of one pytest run; one that takes longer has noticed.
        variables: environment variables of these runs.
    """

    timeout_s: float = 180.0
    variables: Mapping[str, str] = field(default_factory=dict)


GROUPS = {"delivery": Group(600.0, {"FORAGE_WALKS": "120"}), "semantics": Group(), "state": Group()}


class RuleError(Exception):
    """Rules that cannot be tried; one sentence a line."""


def read_rules(group: str) -> list[Rule]:
    """Read the rules of a group from its file.

    Raises:
        RuleError: a line is not understood.
    """
    file = RULES / f"{group}.txt"
    rules: list[Rule] = []
    tests: tuple[str, ...] = ()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        before = rules[-1] if rules else None
        edit = before.edits[-1] if before and before.edits else None
        if line.startswith("[") and line.endswith("]"):
            tests = tuple(line[1:-1].split())
        elif line.startswith("  ") and before:
            rules[-1] = _with_edits(before, (*before.edits, Edit(line.strip(), "", "")))
        elif line.startswith(("- ", "+ ")) and before and edit:
            text = getattr(edit, "old" if line[0] == "-" else "new")
            text = f"{text}\n{line[2:]}" if text else line[2:]
            changed = Edit(edit.file, text, edit.new) if line[0] == "-" else Edit(edit.file, edit.old, text)
            rules[-1] = _with_edits(before, (*before.edits[:-1], changed))
        elif line[0].isalpha() and tests:
            rules.append(Rule(group, line, (), tests))
        else:
            raise RuleError(f"{file.name}:{number}: '{line}' belongs to no rule: see break_rules.py --help")
    return rules


def _with_edits(rule: Rule, edits: tuple[Edit, ...]) -> Rule:
    return Rule(rule.group, rule.name, edits, rule.tests)


def find_tests(repository: Path, name: str) -> list[Path]:
    """Find a test file by its name in the kinds that `make test` runs; a part may have one in each kind.

    Raises:
        RuleError: several parts have one, or this repository has none. Another may be older than the rule.
    """
    found = sorted(file for kind in KINDS for file in (repository / "tests" / kind).rglob(name))
    parts = sorted({find_part(repository, file) for file in found})
    if len(parts) > 1:
        raise RuleError(f"the test file {name} is in {', '.join(parts)}: name the part")
    if not found and repository == REPOSITORY:
        raise RuleError(f"the test file {name} is in none of {', '.join(KINDS)}")
    return found


def find_part(repository: Path, test: Path) -> str:
    return test.relative_to(repository / "tests").parts[1]


def find_problems(repository: Path, rules: Iterable[Rule]) -> list[str]:
    """Find what is not as the rules say: texts and test files that are gone."""
    problems = []
    for rule in rules:
        for edit in rule.edits:
            file = repository / edit.file
            if not edit.old or not file.is_file() or edit.old not in file.read_text(encoding="utf-8"):
                problems.append(f"'{rule.name}': {edit.file} has no '{edit.old}' any more: change {rule.group}.txt")
        if not rule.edits:
            problems.append(f"'{rule.name}' has no edit")
        for name in rule.tests:
            try:
                find_tests(repository, name)
            except RuleError as error:
                problems.append(f"'{rule.name}': {error}")
    return problems


class Copy:
    """A copy of the packages of a repository, in which one rule after the other is broken. One thread may use it."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self._repository = repository
        self._folder = folder
        self._times = itertools.count(10**9)
        for package in list_packages(repository):
            ignored = shutil.ignore_patterns("static", "node_modules")
            shutil.copytree(package, folder / package.relative_to(repository), ignore=ignored)
        self._parts = [str(package.parent) for package in list_packages(folder)]
        for other in repository.iterdir():  # code finds the checkout that it is in
            if not (folder / other.name).exists():
                (folder / other.name).symlink_to(other)
        self._runners: dict[str, Runner] = {}

    @contextmanager
    def broken(self, edits: Iterable[Edit]) -> Iterator[None]:
        """Break a rule for the duration of the context."""
        before: dict[Path, tuple[str, os.stat_result]] = {}
        try:
            for edit in edits:
                file = self._folder / edit.file
                text = file.read_text(encoding="utf-8")
                before.setdefault(file, (text, file.stat()))
                file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
                # Python takes compiled code for that of a file by its time in seconds and its size.
                os.utime(file, (next(self._times),) * 2)
            yield
        finally:
            for file, (text, stat) in before.items():
                file.write_text(text, encoding="utf-8")
                os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def run(self, environment: str, files: Sequence[Path], group: Group, *options: str) -> tuple[int | None, str]:
        """Run test files in an environment; returns pytest's exit code, None after the time limit, and its output."""
        project = tomllib.loads((self._repository / "pyproject.toml").read_text(encoding="utf-8"))
        paths = project["tool"]["pytest"]["ini_options"]["pythonpath"]
        paths = [str(self._folder / path) if str(self._folder / path) in self._parts else path for path in paths]
        arguments = ["-q", "-rfE", "--disable-warnings", "-p", "no:cacheprovider", *options]
        arguments += ["-o", f"pythonpath={' '.join(paths)}", *map(str, files)]
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch, "output")
            output.touch()
            variables = {**group.variables, "PYTHONPATH": os.pathsep.join(self._parts)}
            variables["HYPOTHESIS_STORAGE_DIRECTORY"] = scratch
            run = {"arguments": arguments, "variables": variables, "paths": self._parts, "output": str(output)}
            if environment not in self._runners:
                self._runners[environment] = Runner(self._repository, environment)
            code = self._runners[environment].run(run, group.timeout_s)
            return code, output.read_text(errors="replace", encoding="utf-8")

    def close(self) -> None:
        """End what runs, also from another thread."""
        for runner in self._runners.values():
            runner.close()


class Runner:
    """Runs pytest in an environment, in forks of a process that has imported torch and its like: see forked_pytest."""

    def __init__(self, repository: Path, environment: str) -> None:
        python = repository / ".venvs" / environment / "bin/python"
        self._environment = environment
        self._process = subprocess.Popen(
            [python, RULES.with_name("forked_pytest.py"), *LIBRARIES.get(environment, ())],
            cwd=repository,
            env=_list_variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._run: int | None = None

    def run(self, run: Mapping[str, object], timeout_s: float) -> int | None:
        """Run pytest; returns its exit code, None after the time limit."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        requests.write(json.dumps(run).encode() + b"\n")
        self._run = int(replies.readline() or -1)  # without a buffer: what `select` waits for is never read ahead
        if self._run < 0:
            raise RuleError(f"forked_pytest.py ended in the environment {self._environment}: see above")
        is_in_time = bool(select.select([replies], [], [], timeout_s)[0])
        self._end_run()
        code = int(replies.readline() or -1)
        return code if is_in_time else None

    def close(self) -> None:
        self._end_run()
        self._process.kill()
        self._process.wait()

    def _end_run(self) -> None:
        """End a run with all that it has started and left behind."""
        run, self._run = self._run, None
        if run is not None and run > 0:
            with suppress(ProcessLookupError):
                os.killpg(run, signal.SIGKILL)


def _list_variables() -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in (os.environ | fixed).items() if name != "PYTHONDONTWRITEBYTECODE"}


def split_by_environment(repository: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Environment → files that run in it: that of the service before the first underscore of their part."""
    found: dict[str, list[Path]] = {}
    for file in files:
        service = find_part(repository, file).partition("_")[0]
        found.setdefault(ENVIRONMENT.get(service, service), []).append(file)
    return found


def find_failures(output: str) -> list[str]:
    """The tests that pytest's summary names, in order."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.partition(" ")[2].partition(" - ")[0] for line in lines]


def shorten(test: str) -> str:
    """A test without its folders."""
    file, colons, name = test.partition("::")
    return f"{Path(file).name}{colons}{name}"[:_SHOWN]


@dataclass
class Result:
    """What became of a rule: whether it was noticed (None: that could not be tried), in how long, and by which test."""

    rule: Rule
    noticed: bool | None
    seconds: float
    by: str

    def __str__(self) -> str:
        word = {True: "noticed", False: "NOT NOTICED", None: "NOT TRIED"}[self.noticed]
        return f"{word:12}{self.seconds:6.1f} s  {self.rule.name}" + (f"  ({self.by})" if self.by else "")


def try_rule(copy: Copy, repository: Path, rule: Rule, is_proven: Mapping[tuple[str, Path], bool]) -> Result:
    """Break a rule and run its test files, environment by environment, until one notices."""
    began = time.monotonic()
    files = [file for name in rule.tests for file in find_tests(repository, name)]
    if unproven := [file.name for file in files if not is_proven.get((rule.group, file))]:
        return Result(rule, None, 0.0, f"without a break {', '.join(unproven)} does not pass")
    noticed: bool | None = False
    by = "" if files else "there is no such test file"
    with copy.broken(rule.edits):
        for environment, some in split_by_environment(repository, files).items():
            code, output = copy.run(environment, some, GROUPS[rule.group], "-x")
            if code is None:
                noticed, by = True, "it did not end"
            elif code == _FAILED:
                failures = find_failures(output)
                noticed, by = True, shorten(failures[0]) if failures else "the run broke off"
            elif code != _PASSED:
                noticed, by = None, f"pytest ended with {code}: {output[-500:].strip()}"
            if noticed is not False:
                break
    return Result(rule, noticed, time.monotonic() - began, by)


class Baseline:
    """Which test files pass without a break, remembered for as long as nothing changes."""

    def __init__(self, repository: Path, store: Path) -> None:
        self._repository = repository
        self._store = store
        self._known: list[str] = json.loads(store.read_text(encoding="utf-8")) if store.is_file() else []
        self._lock = threading.Lock()
        self._common = hashlib.sha256()
        folders = [*list_packages(repository), repository / "tests/support", repository / "lab/simulation"]
        shared = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".lua", ".yaml")]
        for file in sorted([*shared, *repository.glob("tests/**/conftest.py"), repository / "pyproject.toml"]):
            self._common.update(str(file.relative_to(repository)).encode() + b"\0" + file.read_bytes())
        self.results: dict[tuple[str, Path], bool] = {}

    def select_unknown(self, rules: Iterable[Rule]) -> dict[str, list[Path]]:
        """The files of each group that are not known to pass."""
        unknown: dict[str, list[Path]] = {}
        for rule in rules:
            for file in itertools.chain.from_iterable(find_tests(self._repository, name) for name in rule.tests):
                if (rule.group, file) not in self.results:
                    self.results[rule.group, file] = self._key(rule.group, file) in self._known
                    if not self.results[rule.group, file]:
                        unknown.setdefault(rule.group, []).append(file)
        return unknown

    def run(self, copy: Copy, group: str, environment: str, files: Sequence[Path]) -> str:
        """Run files without a break; returns a line about it."""
        began = time.monotonic()
        limit = Group(len(files) * GROUPS[group].timeout_s, GROUPS[group].variables)
        code, output = copy.run(environment, files, limit)
        failed = {(self._repository / test.partition("::")[0]).resolve() for test in find_failures(output)}
        passed = [file for file in files if code in (_PASSED, _FAILED) and file.resolve() not in failed]
        if code == _FAILED and not failed:
            passed = []
        with self._lock:
            self.results |= {(group, file): True for file in passed}
            self._known += [self._key(group, file) for file in passed]
            self._store.parent.mkdir(parents=True, exist_ok=True)
            self._store.write_text(json.dumps(self._known[-2000:]), encoding="utf-8")
        line = f"baseline    {time.monotonic() - began:6.1f} s  {group} in {environment}: {len(passed)} files pass"
        if len(passed) < len(files):
            line += f", {len(files) - len(passed)} do not: {' '.join(find_failures(output)) or output[-2000:]}"
        return line

    def _key(self, group: str, file: Path) -> str:
        digest = self._common.copy()
        digest.update(json.dumps([str(file), sorted(GROUPS[group].variables.items())]).encode() + file.read_bytes())
        return digest.hexdigest()


def select_rules(names: Sequence[str]) -> list[Rule]:
    """Select rules by names of groups and beginnings of names; all by default.

    Raises:
        RuleError: a name selects nothing, or as `read_rules`.
    """
    rules = [rule for group in GROUPS for rule in read_rules(group)]
    for name in names:
        if not any(rule.group == name or rule.name.startswith(name) for rule in rules):
            raise RuleError(f"'{name}' is no group and begins no rule; groups: {', '.join(GROUPS)}")
    return [rule for rule in rules if not names or rule.group in names or rule.name.startswith(tuple(names))]


def summarize(results: Sequence[Result], seconds: float) -> dict[str, object]:
    """Count by group."""
    groups = {}
    for group in GROUPS:
        if own := [result for result in results if result.rule.group == group]:
            groups[group] = {"rules": len(own), "noticed": sum(result.noticed is True for result in own)}
    return {
        "rules": len(results),
        "noticed": sum(result.noticed is True for result in results),
        "groups": groups,
        "not_noticed": [result.rule.name for result in results if result.noticed is False],
        "not_tried": [result.rule.name for result in results if result.noticed is None],
        "seconds": round(seconds),
    }


def main(arguments: Sequence[str]) -> int:
    """Break the rules one by one, several at a time."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=f"{__doc__}\n\n{HELP}", epilog=EXAMPLES, formatter_class=formatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a group ({', '.join(GROUPS)}), or how rules begin")
    parser.add_argument("--jobs", type=int, default=2, help="rules that are tried at once, each in its own copy")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="clone to try, with its own .venvs")
    options = parser.parse_args(arguments)
    repository, began = options.repository.resolve(), time.monotonic()
    try:
        rules = select_rules(options.names)
        if problems := find_problems(repository, rules):
            raise RuleError("\nbreak_rules: ".join(problems))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with tempfile.TemporaryDirectory(prefix="break-rules-") as folder:
            results = _try_rules(repository, rules, options.jobs, Path(folder))
    except RuleError as error:
        print(f"break_rules: {error}", file=sys.stderr)
        return 2
    summary = summarize(results, time.monotonic() - began)
    print(json.dumps(summary))
    return 0 if summary["noticed"] == len(rules) else 1


def _try_rules(repository: Path, rules: Sequence[Rule], jobs: int, folder: Path) -> list[Result]:
    copies: list[Copy] = []
    names, numbers, mine = itertools.count(), itertools.count(1), threading.local()

    def get_copy() -> Copy:
        if not hasattr(mine, "copy"):
            mine.copy = Copy(repository, folder / str(next(names)))
            copies.append(mine.copy)
        own: Copy = mine.copy
        return own

    def check(group: str, environment: str, files: Sequence[Path]) -> None:
        print(baseline.run(get_copy(), group, environment, files), flush=True)

    def attempt(rule: Rule) -> Result:
        result = try_rule(get_copy(), repository, rule, baseline.results)
        print(f"{next(numbers):3}/{len(rules)} {result}", flush=True)
        return result

    baseline = Baseline(repository, REPOSITORY / ".cache/break_rules.json")
    pool = ThreadPoolExecutor(jobs, "rules")
    try:
        unknown = baseline.select_unknown(rules)
        new, all_ = sum(map(len, unknown.values())), len(baseline.results)
        print(
            f"{len(rules)} rules; {all_ - new} test files are known to pass without a break, {new} are run", flush=True
        )
        runs = [
            (group, environment, some)
            for group, files in unknown.items()
            for environment, some in split_by_environment(repository, files).items()
        ]
        for ended in [pool.submit(check, *run) for run in sorted(runs, key=lambda run: -len(run[2]))]:
            ended.result()
        return [ended.result() for ended in [pool.submit(attempt, rule) for rule in rules]]
    finally:  # also at Ctrl-C or SIGTERM
        pool.shutdown(wait=False, cancel_futures=True)
        for copy in copies:
            copy.close()
        pool.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
