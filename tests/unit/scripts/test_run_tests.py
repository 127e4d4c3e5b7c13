"""`scripts/run_tests.py` finds every test, deals them out, counts by reports and tells unstable from failed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_tests
from limits import WAIT_S
from run_tests import (
    Case,
    FrontEndJob,
    Job,
    find_misplaced_tests,
    list_jobs,
    list_test_files,
    main,
    read_cases,
    record_seconds,
    repeat_failed,
    run_jobs,
    select_shard,
    summarize,
)

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.unit.cli.test_a" file="tests/unit/cli/test_a.py" name="test_good[1-x]" time="1.5"/>
<testcase classname="tests.unit.cli.test_a.TestB" file="tests/unit/cli/test_a.py" name="test_bad" time="2.5">
<failure message="no"/></testcase>
<testcase classname="tests.a" name="test_broken" time="0"><error message="no"/></testcase>
<testcase classname="tests.a" name="test_left_out" time="0"><skipped message="no Chromium"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of which the tests have recorded seconds."""
    seconds = {"unit/cli/test_a.py": 100.0, "unit/cli/test_b.py": 90.0, "unit/cli/test_c.py": 60.0}
    for name in (*seconds, "unit/cli/test_new.py", "nightly/cli_chaos/test_d.py", "system/cli/test_e.py"):
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / ".venvs/cli").mkdir(parents=True)
    monkeypatch.setattr(run_tests, "REPOSITORY", tmp_path)
    monkeypatch.setattr(run_tests, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(run_tests, "SECONDS", tmp_path / "tests/seconds.json")
    run_tests.SECONDS.write_text(json.dumps(seconds))
    return tmp_path / "tests"


def build_job(name: str, *outcomes: str, status: int = 0) -> Job:
    cases = [Case(f"tests/{name}/test_a.py::test_{number}", 1.0, outcome) for number, outcome in enumerate(outcomes)]
    return Job(run_tests.TESTS / name, status=status, cases=cases)


def test_no_test_of_the_repository_is_misplaced() -> None:
    assert find_misplaced_tests() == []


@pytest.mark.parametrize(
    "place", ["test_a.py", "unit/test_a.py", "unit/nobody/test_a.py", "nokind/cli/test_a.py", "support/test_a.py"]
)
def test_a_test_file_outside_kind_and_service_stops_the_run(
    tree: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    file = tree / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert find_misplaced_tests() == [f"tests/{place}"]
    assert main(["quick"]) == 2
    assert f"no kind runs tests/{place}" in capsys.readouterr().err


@pytest.mark.parametrize("kinds", [[], ["fast"], ["unit", "slow"]])
def test_an_unknown_kind_is_refused_with_the_known_ones(kinds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(kinds)
    said = capsys.readouterr().err
    assert "component" in said or "arguments are required: kinds" in said


def test_cases_of_a_report_have_the_names_by_which_pytest_runs_them_alone(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    cases = list(read_cases(tmp_path / "report.xml"))
    assert [(case.id, case.outcome) for case in cases] == [
        ("tests/unit/cli/test_a.py::test_good[1-x]", "passed"),
        ("tests/unit/cli/test_a.py::TestB::test_bad", "failed"),
        ("tests.a::test_broken", "failed"),
        ("tests.a::test_left_out", "skipped"),
    ]


def test_totals_are_those_of_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    job = Job(run_tests.TESTS / "unit/cli", status=1, cases=list(read_cases(tmp_path / "report.xml")))
    assert summarize([job]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "1 passed, 2 failed, 1 skipped"
    assert "failed: tests/unit/cli/test_a.py::TestB::test_bad" in printed
    assert "skipped 1: no Chromium" in printed


def test_a_run_that_ended_without_a_report_counts_as_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert summarize([build_job("unit/cli", status=139)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_run_that_ended_well_and_left_no_report_has_failed(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    """As where a test calls `os.execve`: another program takes the place of pytest, and ends with 0."""
    file = run_tests.TESTS / "unit/cli/test_it.py"
    job = Job(file.parent, [file])
    ended = SimpleNamespace(returncode=0, stdout="half of the dots")
    monkeypatch.setattr(run_tests, "_run", lambda command: ended)
    assert "half of the dots\nunit/cli ended without a report" in job.run([])
    assert summarize([job]) == 1


def test_a_process_that_a_test_left_behind_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert summarize([build_job("unit/cli", "passed")], ["redis-server *:1234"]) == 1
    printed = capsys.readouterr().out
    assert "left behind by a test, and killed: redis-server *:1234" in printed
    assert printed.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_every_part_runs_in_the_environment_of_its_service() -> None:
    environments = {job.name: job.environment for job in list_jobs(list_test_files(["unit"]), with_front_end=True)}
    assert environments["unit/runtime"] == environments["unit/probe"] == environments["unit/cli"] == "cli"
    assert environments["unit/models"] == environments["unit/weights"] == environments["unit/trainer"] == "trainer"
    assert environments["unit/sandbox"] == environments["unit/reward"] == "reward"
    assert Job(run_tests.TESTS / "component/rollout_deployments").environment == "rollout"
    assert environments["unit/console_web"] == "node"


def test_options_for_pytest_do_not_go_to_the_front_end(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def keep(jobs: list[Job], workers: int, run: object) -> None:
        asked.append([type(job).__name__ for job in jobs])

    monkeypatch.setattr(run_tests, "run_jobs", keep)
    monkeypatch.setattr(run_tests, "adopt_orphans", lambda: None)
    monkeypatch.setattr(run_tests, "end_leftovers", lambda: [])
    monkeypatch.setattr(run_tests, "REPORTS", tree / "reports")
    assert main(["unit"]) == main(["unit", "--", "-k", "streams"]) == main(["system"]) == 0
    assert [FrontEndJob.__name__ in kinds for kinds in asked] == [True, False, False]


def test_a_long_folder_runs_in_pieces_of_similar_seconds(tree: Path) -> None:
    jobs = list_jobs(list_test_files(["unit"]))
    assert [(job.title, [file.name for file in job.files], job.expected_s) for job in jobs] == [
        ("unit/cli 2/2", ["test_b.py", "test_c.py"], 150.0),
        ("unit/cli 1/2", ["test_a.py", "test_new.py"], 100.5),
    ]


def test_shards_have_every_file_once_and_similar_seconds(tree: Path) -> None:
    files = list_test_files(run_tests.QUICK + run_tests.LONG)
    shards = [select_shard(files, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(file for shard in shards for file in shard) == sorted(files)
    names = [sorted(file.stem for file in shard) for shard in shards]
    assert names == [["test_a", "test_new"], ["test_b", "test_d"], ["test_c", "test_e"]]
    assert select_shard(files[:1], "4/4") == []


@pytest.mark.parametrize("shard", ["5/4", "0/4", "2", "a/b", "/"])
def test_a_wrong_shard_is_refused(tree: Path, shard: str) -> None:
    with pytest.raises(SystemExit, match="expected NUMBER/COUNT such as 2/4"):
        select_shard([], shard)


def test_recorded_seconds_are_renewed_for_what_ran_and_kept_for_the_rest(tree: Path) -> None:
    (tree / "unit/cli/test_c.py").unlink()
    cases = [Case("tests/unit/cli/test_a.py::test_x", 2.04, "passed"), Case("src/a.test.ts::b", 9.0, "passed")]
    record_seconds([Job(tree / "unit/cli", cases=cases)])
    assert json.loads(run_tests.SECONDS.read_text()) == {"unit/cli/test_a.py": 2.0, "unit/cli/test_b.py": 90.0}


class Repeated(Job):
    """A job whose cases pass or fail when they are repeated."""

    passing: tuple[str, ...] = ()

    def _passes(self, case: Case) -> bool:
        return case.id.endswith(self.passing)


def test_a_case_that_passes_alone_is_unstable_and_more_than_two_fail_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for count, status in ((2, 0), (3, 1)):
        job = Repeated(run_tests.TESTS / "system/cli", status=1)
        job.cases = build_job("system/cli", *["failed"] * count, "passed").cases
        job.passing = ("_0", "_1", "_2")
        repeat_failed([job])
        assert summarize([job]) == status
        printed = capsys.readouterr().out
        assert printed.count("unstable: tests/system/cli/test_a.py") == count
        assert printed.splitlines()[-1] == f"{count + 1} passed, 0 failed, 0 skipped"


def test_a_case_that_fails_again_has_failed() -> None:
    job = Repeated(run_tests.TESTS / "nightly/cli", status=1, cases=build_job("nightly/cli", "failed", "failed").cases)
    job.passing = ("_1",)
    repeat_failed([job])
    assert [case.outcome for case in job.cases] == ["failed", "unstable"]
    assert summarize([job]) == 1


@pytest.mark.parametrize(("kind", "count"), [("unit", 1), ("component", 1), ("e2e", 1), ("nightly", 11)])
def test_nothing_is_repeated_in_the_other_kinds_nor_where_much_failed(kind: str, count: int) -> None:
    job = Repeated(run_tests.TESTS / f"{kind}/cli", status=1)
    job.cases, job.passing = build_job(f"{kind}/cli", *["failed"] * count).cases, ("",)
    repeat_failed([job])
    assert {case.outcome for case in job.cases} == {"failed"}


def test_a_system_runs_beside_other_tests_but_not_beside_a_system() -> None:
    jobs = [Job(run_tests.TESTS / name) for name in ("system/cli", "nightly/cli_chaos", "unit/cli", "unit/reward")]
    pairs: list[set[str]] = []
    meeting = threading.Barrier(2, action=lambda: pairs.append({job.name for job in running}))
    running: list[Job] = []

    def run(job: Job) -> None:
        running.append(job)
        meeting.wait(WAIT_S)  # breaks unless two jobs run at the same time
        meeting.wait(WAIT_S)
        running.remove(job)

    run_jobs(jobs, 2, run)
    assert all(len(pair & {"system/cli", "nightly/cli_chaos"}) == 1 for pair in pairs), pairs
    assert set().union(*pairs) == {job.name for job in jobs}


def test_systems_alone_run_one_after_another() -> None:
    order: list[str] = []
    running = threading.Semaphore(1)

    def run(job: Job) -> None:
        assert running.acquire(blocking=False), "another system is running"
        order.append(job.name)
        running.release()

    jobs = [Job(run_tests.TESTS / name) for name in ("system/cli", "nightly/cli_chaos", "e2e/cli")]
    run_jobs(jobs, 4, run)
    assert order == [job.name for job in jobs]
