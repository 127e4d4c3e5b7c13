"""`scripts/check_tests.py` finds planted violations of each of its rules, and nothing in tests that keep them."""

from __future__ import annotations

from pathlib import Path

import check_tests
import pytest
from check_tests import check_file

PLANTED = {
    "fast": [
        "began = time.monotonic()\n    assert time.monotonic() - began < 2",
        "began = time.time()\n    took = time.time() - began\n    assert took <= LIMIT_S, 'slow'",
        "seconds = measure()\n    assert 1 < seconds < 5",
        "assert 3 > time.perf_counter() - began",
    ],
    "short": [
        "deadline = time.monotonic() + 10",
        "deadline = time.time() + LIMIT_S",
        "process.wait(timeout=5)",
        "assert event.wait(5)",
        "await asyncio.wait_for(event.wait(), 2)",
        "queue.get(timeout=1)",
        "future.result(10)",
        "thread.join(3)",
        "async with asyncio.timeout(5): pass",
    ],
    "socket": ["import socket", "from http.server import HTTPServer", "import server_support"],
    "process": ["import subprocess"],
    "sleep": ["time.sleep(0.1)", "await asyncio.sleep(pause)"],
}
KEPT = [
    "while time.monotonic() < deadline: pass",
    "assert time.monotonic() < deadline, 'hangs'",
    "assert time.monotonic() - began > 1",
    "assert not event.wait(0.1)",
    "with pytest.raises(TimeoutError):\n        process.wait(timeout=1)",
    "process.wait(timeout=60)",
    "await asyncio.sleep(0)",
    "settings.get('a', 5)",
    "assert time.monotonic() - began < 2  # lint: fast because the clock is injected",
]


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_tests, "REPOSITORY", tmp_path)
    monkeypatch.setattr(check_tests, "TESTS", tmp_path)
    for folder in ("unit", "component", "support"):
        (tmp_path / folder).mkdir()
    (tmp_path / "support/server_support.py").write_text("import socket\n")
    return tmp_path / "unit"


def check(folder: Path, code: str) -> list[str]:
    check_tests._read.cache_clear()
    check_tests._list_costs.cache_clear()
    (folder / "test_a.py").write_text(f"import time\nLIMIT_S = 20\nasync def test_a():\n    {code}\n")
    return [violation.rule for violation in check_file(folder / "test_a.py")]


@pytest.mark.parametrize(("rule", "code"), [(rule, code) for rule, codes in PLANTED.items() for code in codes])
def test_a_planted_violation_is_found(unit: Path, rule: str, code: str) -> None:
    assert check(unit, code) == [rule]
    only_of_units = rule in ("socket", "process", "sleep")
    assert check(unit.parent / "component", code) == ([] if only_of_units else [rule])


@pytest.mark.parametrize("code", KEPT)
def test_what_keeps_the_rules_is_not_found(unit: Path, code: str) -> None:
    assert check(unit, code) == []


def test_an_exception_needs_its_rule_and_a_reason(unit: Path) -> None:
    assert check(unit, "time.sleep(1)  # lint: sleep because the kernel has no event") == []
    assert check(unit, "time.sleep(1)  # lint: sleep") == ["sleep"]
    assert check(unit, "time.sleep(1)  # lint: fast because of something else") == ["sleep"]
