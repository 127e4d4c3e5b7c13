"""Rules for tests that `make lint` checks, by reading their sources; each violation is one line.

Every test: nothing depends on the speed of the machine.
    fast       an assertion that something took less than a time
    short      a wait of less than a minute for what must happen

Tests of the kind `unit`: one process, which uses no network and waits for nothing.
    socket, process, sleep      the test, or a module of tests/support that it imports, uses one

A line ends in `# lint: RULE because …` where the rule does not apply, which needs a reason. tests/unit/conftest.py
refuses the same in a unit test while it runs, wherever the call is made.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
LEAST_WAIT_S = 60.0
CLOCKS = {"monotonic", "perf_counter", "time", "process_time", "thread_time"}
WAITS = {
    "wait_for": (1, "timeout"),  # asyncio
    "timeout": (0, "delay"),  # asyncio
    "wait": (0, "timeout"),  # events, processes, conditions
    "communicate": (1, "timeout"),
    "join": (0, "timeout"),
    "result": (0, "timeout"),
    "get": (1, "timeout"),  # queues
    "run": (-1, "timeout"),
    "check_output": (-1, "timeout"),
}
"""Calls that wait → the position (-1: none) and the keyword of their limit in seconds."""
SOCKETS = {
    "socket",
    "socketserver",
    "http.client",
    "http.server",
    "urllib.request",
    "grpc",
    "httpx",
    "requests",
    "redis",
}
PROCESSES = {"subprocess", "multiprocessing", "concurrent.futures.process"}
_ALLOWED = re.compile(r"# lint: ([a-z, ]+) because \S")


@dataclass(frozen=True, order=True)
class Violation:
    """A place that breaks a rule."""

    file: Path
    line: int
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(REPOSITORY)}:{self.line}: {self.rule}: {self.remedy}"


def check_file(file: Path) -> list[Violation]:
    """Find what breaks the rules in one file of tests/."""
    tree, allowed = _read(file)
    found = [*_find_clocks(file, tree), *_find_short_waits(file, tree)]
    if file.is_relative_to(TESTS / "unit"):
        found += _find_costs(file)
    return sorted({each for each in found if each.rule not in allowed.get(each.line, ())})


@cache
def _read(file: Path) -> tuple[ast.Module, dict[int, set[str]]]:
    """Read a file, and where a comment in it allows what a rule forbids: line → rules."""
    source = file.read_text(encoding="utf-8")
    allowed = {
        number: {rule.strip() for rule in match[1].split(",")}
        for number, line in enumerate(source.splitlines(), 1)
        if (match := _ALLOWED.search(line))
    }
    return ast.parse(source), allowed


def _find_clocks(file: Path, tree: ast.Module) -> Iterator[Violation]:
    """Find assertions with an upper bound on something that was computed from a clock."""
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        measured = set()
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign | ast.AugAssign) and _reads_clock(node.value, measured):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Sub):
                    measured |= {
                        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                    }
        for node in ast.walk(scope):
            if isinstance(node, ast.Assert) and any(_is_bound(each, measured) for each in ast.walk(node.test)):
                yield Violation(
                    file,
                    node.lineno,
                    "fast",
                    "wait for the event, or inject the clock: machines are slow by any factor",
                )


def _reads_clock(node: ast.expr, measured: set[str]) -> bool:
    return any(
        (isinstance(each, ast.Name) and each.id in {"took", "seconds", "elapsed"})
        or (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr in CLOCKS
            and _is_module(each.func.value)
        )
        or (isinstance(each, ast.Name) and each.id in measured)
        for each in ast.walk(node)
    )


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "time"


def _is_bound(node: ast.AST, measured: set[str]) -> bool:
    """Whether it compares a measured time with what it must be less than, which is no deadline of a loop."""
    if not isinstance(node, ast.Compare):
        return False
    operands = [node.left, *node.comparators]
    for (left, right), operator in zip(pairwise(operands), node.ops, strict=True):
        small, large = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
        if not isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) or not _reads_clock(small, measured):
            continue
        if not any(
            isinstance(each, ast.Name | ast.Attribute) and "deadline" in ast.unparse(each) for each in ast.walk(large)
        ):
            return True
    return False


def _find_short_waits(file: Path, tree: ast.Module) -> Iterator[Violation]:
    constants = {
        target.id: value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and (value := _seconds(node.value, {})) is not None
    }
    expected_to_fail = _list_lines_of_failures(tree)
    for node in ast.walk(tree):
        limit = _limit_of(node)
        if limit is None or node.lineno in expected_to_fail:  # type: ignore[attr-defined]
            continue
        seconds = _seconds(limit, constants)
        if seconds is not None and 0 < seconds < LEAST_WAIT_S:
            line: int = node.lineno  # type: ignore[attr-defined]
            yield Violation(
                file, line, "short", f"{seconds:g} s are too few on a busy machine: use waiting.wait_until, or WAIT_S"
            )


def _limit_of(node: ast.AST) -> ast.expr | None:
    """The limit of a wait: of a call that waits, or of `deadline = time.monotonic() + limit`."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in WAITS:
            return None
        position, keyword = WAITS[name]
        given = next((each.value for each in node.keywords if each.arg == keyword), None)
        if given is None and 0 <= position < len(node.args) and not (name == "get" and not node.keywords):
            given = node.args[position]
        return given
    if isinstance(node, ast.Assign) and any("deadline" in ast.unparse(target) for target in node.targets):
        for each in ast.walk(node.value):
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Add) and _reads_clock(each.left, set()):
                return each.right
    return None


def _list_lines_of_failures(tree: ast.Module) -> set[int]:
    """List the lines where a wait is meant to end without its event: `assert not …`, and inside pytest.raises."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        negated = (
            isinstance(node, ast.Assert) and isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        )
        raises = isinstance(node, ast.With) and any("raises(" in ast.unparse(item.context_expr) for item in node.items)
        if negated or raises:
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return lines


def _seconds(node: ast.expr, constants: dict[str, float]) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def _find_costs(file: Path) -> Iterator[Violation]:
    """Find what a unit test may not use, in its own source and in the modules of tests/support that it imports."""
    for rule, line, how in _list_costs(file):
        yield Violation(file, line, rule, f"{how}: move the test to tests/component")


@cache
def _list_costs(file: Path, with_support: bool = True) -> tuple[tuple[str, int, str], ...]:
    """List (rule, line, how) for a file, and for the support modules that it names, at the line of their import."""
    tree, allowed = _read(file)
    costs: list[tuple[str, int, str]] = []
    for node in ast.walk(tree):
        for module in _imported(node):
            line: int = node.lineno  # type: ignore[attr-defined]
            if module in SOCKETS:
                costs.append(("socket", line, f"it imports {module}"))
            if module in PROCESSES:
                costs.append(("process", line, f"it imports {module}"))
            support = TESTS / "support" / f"{module.replace('.', '/')}.py"
            if with_support and support.is_file():
                costs += [(rule, line, f"{module}: {how}") for rule, _, how in _list_costs(support, False)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            yields = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not yields:
                costs.append(("sleep", node.lineno, f"{ast.unparse(node.func)} waits"))
    return tuple(cost for cost in dict.fromkeys(costs) if cost[0] not in allowed.get(cost[1], ()))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def list_files() -> list[Path]:
    return sorted(file for file in TESTS.rglob("*.py") if "data" not in file.relative_to(TESTS).parts)


def main(names: list[str]) -> int:
    files = [Path(name).resolve() for name in names] or list_files()
    violations = [violation for file in files for violation in check_file(file)]
    sys.stderr.writelines(f"tests: {violation}\n" for violation in violations)
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
