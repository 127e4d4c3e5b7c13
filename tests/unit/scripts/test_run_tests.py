"""`scripts/run_tests.py` finds every test and counts by pytest's reports."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import run_tests
from run_tests import Job, find_misplaced_tests, list_jobs, main, run_jobs, summarize

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.a" name="test_good" time="1.5"/>
<testcase classname="tests.a" name="test_bad" time="2.5"><failure message="no"/></testcase>
<testcase classname="tests.a" name="test_broken" time="0"><error message="no"/></testcase>
<testcase classname="tests.a" name="test_left_out" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_no_test_of_the_repository_is_misplaced() -> None:
    assert find_misplaced_tests() == []


@pytest.mark.parametrize(
    "place", ["test_a.py", "unit/test_a.py", "unit/nobody/test_a.py", "nokind/cli/test_a.py", "support/test_a.py"]
)
def test_a_test_file_outside_kind_and_service_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    file = tmp_path / "tests" / place
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / ".venvs/cli").mkdir(parents=True)
    monkeypatch.setattr(run_tests, "REPOSITORY", tmp_path)
    monkeypatch.setattr(run_tests, "TESTS", tmp_path / "tests")
    assert find_misplaced_tests() == [f"tests/{place}"]
    assert main(["quick"]) == 2
    assert f"no kind runs tests/{place}" in capsys.readouterr().err


@pytest.mark.parametrize("kinds", [[], ["fast"], ["unit", "slow"]])
def test_an_unknown_kind_is_refused_with_the_known_ones(kinds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(kinds) == 2
    assert "expected some of quick, long, unit" in capsys.readouterr().err


def test_totals_are_those_of_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    job = Job(run_tests.TESTS / "unit/cli", status=1, cases=list(run_tests._read_cases(report)))
    assert summarize([job]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "1 passed, 2 failed, 1 skipped"
    assert "failed: tests.a::test_bad (unit/cli)" in printed


def test_a_run_that_ended_without_a_report_counts_as_failed(capsys: pytest.CaptureFixture[str]) -> None:
    crashed = Job(run_tests.TESTS / "unit/cli", status=139)
    assert summarize([crashed]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_every_part_runs_in_the_environment_of_its_service() -> None:
    environments = {job.name: job.environment for job in list_jobs(run_tests.QUICK + run_tests.LONG)}
    assert environments["unit/common"] == environments["unit/probe"] == environments["unit/cli"] == "cli"
    assert environments["unit/models"] == environments["unit/policies"] == environments["unit/trainer"] == "trainer"
    assert environments["unit/isolation"] == environments["unit/reward"] == "reward"
    assert environments["contract/rollout_deployments"] == "rollout"
    assert environments["unit/console_web"] == "node"


def test_options_for_pytest_do_not_go_to_the_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def keep(jobs: list[Job], workers: int, run: object) -> None:
        asked.append([job.name for job in jobs])

    monkeypatch.setattr(run_tests, "run_jobs", keep)
    assert main(["unit"]) == main(["unit", "--", "-k", "streams"]) == 0
    with_it, without_it = asked
    assert [name for name in with_it if name not in without_it] == ["unit/console_web"]
    assert main(["contract"]) == 0
    assert "unit/console_web" not in asked[-1]


def test_a_system_runs_beside_other_tests_but_not_beside_a_system() -> None:
    jobs = [Job(run_tests.TESTS / name) for name in ("system/cli", "chaos/cli", "unit/cli", "unit/reward")]
    pairs: list[set[str]] = []
    meeting = threading.Barrier(2, action=lambda: pairs.append({job.name for job in running}))
    running: list[Job] = []

    def run(job: Job) -> None:
        running.append(job)
        meeting.wait(20)  # breaks unless two jobs run at the same time
        meeting.wait(20)
        running.remove(job)

    run_jobs(jobs, 2, run)
    assert all(len(pair & {"system/cli", "chaos/cli"}) == 1 for pair in pairs), pairs
    assert set().union(*pairs) == {job.name for job in jobs}


def test_systems_alone_run_one_after_another() -> None:
    order: list[str] = []
    running = threading.Semaphore(1)

    def run(job: Job) -> None:
        assert running.acquire(blocking=False), "another system is running"
        order.append(job.name)
        running.release()

    jobs = [Job(run_tests.TESTS / name) for name in ("system/cli", "chaos/cli", "e2e/cli")]
    run_jobs(jobs, 4, run)
    assert order == [job.name for job in jobs]
