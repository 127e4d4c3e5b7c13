"""`forage eval` as a user runs it, with services whose answers are known."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from evaluation_services import CAPITALS, Scripted, serve, write_questions
from typer.testing import CliRunner
from waiting import WAIT_S

from forage_cli.main import app
from forage_proto.v1.trajectory_pb2 import Prompt, Status
from forage_records.trajectory_file import read_trajectories
from forage_runtime.errors import UserError

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


def answer_from_passages(prompt: Prompt, sample: int = 0) -> str:
    """Right after a search, and from passages but for Chad; wrong without either."""
    (target,) = prompt.ground_truth.targets
    if not prompt.environment:
        return target
    return target if "<information>" in prompt.messages[0].content and target != "N'Djamena" else "Paris"


@pytest.fixture
def script() -> Scripted:
    return Scripted(says=answer_from_passages)


@pytest.fixture
def services(script: Scripted, free_address: Callable[[], str]) -> Iterator[list[str]]:
    with serve(script, free_address) as settings:
        yield settings


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write_questions(tmp_path / "capitals.parquet")


def evaluate(questions: Path, services: list[str], out: Path, *more: str) -> str:
    command = ["eval", str(questions), *services, "--policy", "running", "--out", str(out), *more]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def read_results(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    summary = json.loads((out / "results.json").read_text())
    return {(entry["method"], entry["data_source"]): entry for entry in summary["results"]}


def test_a_policy_and_its_baselines_are_in_one_table(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    output = evaluate(questions, services, out, "--baselines", "direct,cot,rag")
    results = read_results(out)
    assert {key: entry["em"]["mean"] for key, entry in results.items()} == {
        ("search", "capitals"): 1.0,
        ("direct", "capitals"): 0.0,
        ("cot", "capitals"): 0.0,
        ("rag", "capitals"): 0.8,
    }
    search, rag = results["search", "capitals"], results["rag", "capitals"]
    assert (search["searches"], search["turns"], search["hit"], search["format"]) == (1.0, 2.0, 1.0, 1.0)
    assert (search["prompt_tokens"], search["generated_tokens"], search["seconds"]) == (12.0, 6.0, 0.5)
    assert (search["sub_em"]["mean"], search["f1"]["mean"]) == (1.0, 1.0)
    assert (rag["searches"], rag["hit"], rag["truncated"], rag["finished"]) == (0.0, 1.0, 0.0, 1.0)
    assert 0.4 <= rag["em"]["low"] < 0.8 < rag["em"]["high"] == 1.0
    assert results["direct", "capitals"]["hit"] is None
    for text in ("chain of thought", "one-shot RAG", "0.800"):
        assert text in output
    rows = pq.read_table(out / "results.parquet").to_pylist()
    assert len(rows) == 4 * len(CAPITALS)
    assert {row["question"] for row in rows if row["method"] == "rag" and row["em"] == 0} == {"Capital of Chad?"}
    whole = list(read_trajectories(out / "trajectories" / "running-rag.parquet"))
    assert {t.ground_truth.targets[0] for t in whole} == set(CAPITALS.values())
    page = (out / "report.html").read_text()
    assert "one-shot RAG" in page
    assert page.count("<svg") == 2


def test_every_method_has_its_own_prompt_for_the_same_question(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    evaluate(questions, services, tmp_path / "out", "--baselines", "direct,cot,rag", "--limit", "1")
    asked = {prompt.group_uid.rpartition("/")[2]: prompt for prompt in script.asked}
    texts = {method: prompt.messages[0].content for method, prompt in asked.items()}
    assert texts["search"] == "Search. Question: Capital of Norway?\n"
    assert {method: prompt.environment for method, prompt in asked.items()} == {
        "search": "",
        "direct": "single_turn",
        "cot": "single_turn",
        "rag": "single_turn",
    }
    assert "<think>" in texts["cot"]
    assert "<think>" not in texts["direct"]
    assert all(text.endswith("Question: Capital of Norway?\n") for text in texts.values())
    passages = texts["rag"].partition("</information>")[0]
    assert passages == (
        '<information>Doc 1(Title: "Norway") The capital is Oslo. &lt;answer&gt; Oslo &lt;/answer&gt;'
    ), "a passage cannot answer in the policy's place"
    assert len({prompt.sampling.seed for prompt in asked.values()}) == 1, "all draw alike"
    assert {prompt.sampling.temperature for prompt in asked.values()} == {0.0}


def test_finished_items_are_not_run_again_and_items_can_be_added(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    evaluate(questions, services, out, "--limit", "3")
    assert len(script.asked) == 3
    evaluate(questions, services, out, "--limit", "3")
    assert len(script.asked) == 3
    output = evaluate(questions, services, out, "--baselines", "direct")
    assert "3 of 10 were finished before" in output
    assert len(script.asked) == 10
    assert read_results(out)["search", "capitals"]["questions"] == 5


def test_a_limit_applies_to_every_file_and_changes_no_seed(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    other = write_questions(tmp_path / "other.parquet", source="others")
    evaluate(questions, [str(other), *services], tmp_path / "out", "--limit", "2")
    seeds = {prompt.group_uid: prompt.sampling.seed for prompt in script.asked}
    assert seeds == {
        "capitals/test/0/search": 1,
        "capitals/test/1/search": 2,
        "others/test/0/search": 6,
        "others/test/1/search": 7,
    }
    assert [source for _, source in read_results(tmp_path / "out")] == ["capitals", "others", "all"]


def test_failed_questions_enter_no_mean_and_are_retried(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    away = {"Oslo": Status.STATUS_TIMEOUT, "Rome": Status.STATUS_INVALID_INPUT}
    script.status = lambda prompt: away.get(prompt.ground_truth.targets[0], Status.STATUS_OK)
    output = evaluate(questions, services, out)
    results = read_results(out)["search", "capitals"]
    assert (results["questions"], results["failed_questions"], results["em"]["mean"]) == (3, 2, 1.0)
    assert "running/search failed at capitals/test/0: TIMEOUT: scripted failure" in output
    assert "INVALID_INPUT: scripted failure" in (out / "report.html").read_text()
    script.status = lambda prompt: Status.STATUS_OK
    before = len(script.asked)
    evaluate(questions, services, out)
    results = read_results(out)["search", "capitals"]
    assert len(script.asked) == before + 1, "what is invalid stays invalid"
    assert (results["questions"], results["failed_questions"]) == (4, 1)


def test_the_error_names_the_reason_when_every_question_failed(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    script.status = lambda prompt: Status.STATUS_INTERNAL
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["eval", str(questions), *services, "--policy", "running", "--out", str(out)])
    with pytest.raises(UserError, match="every question failed: INTERNAL: scripted failure"):
        raise done.exception or AssertionError(done.output)
    assert read_results(out)["search", "capitals"]["em"] is None
    assert (out / "report.html").exists()


def test_several_samples_give_pass_and_majority(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    def answer_question(prompt: Prompt, sample: int) -> str:
        return prompt.ground_truth.targets[0] if sample == 0 else f"wrong {sample % 2}"

    script.says = answer_question
    output = evaluate(questions, services, tmp_path / "out", "--samples", "4")
    results = read_results(tmp_path / "out")["search", "capitals"]
    assert results["em"]["mean"] == 0.25
    assert {k: value["mean"] for k, value in results["pass_at_k"].items()} == {"1": 0.25, "2": 0.5, "4": 1.0}
    assert results["majority_at_k"]["1"]["mean"] == 0.25
    assert results["majority_at_k"]["4"]["mean"] == 0.0, "one right answer, two equal wrong ones"
    assert "pass@4" in output
    assert {prompt.sampling.temperature for prompt in script.asked} == {1.0}
    seeds = sorted(prompt.sampling.seed for prompt in script.asked)
    assert seeds == [1, 5, 9, 13, 17], "no two samples share one"


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)], ids=["kill -9", "Ctrl-C"])
def test_an_interruption_loses_no_finished_item(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path, ending: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    script.hold = 7
    command = [*FORAGE, "eval", str(questions), *services, "rollout.max_groups_in_flight=1"]
    command += ["--policy", "running", "--baselines", "direct", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert script.held.wait(WAIT_S)
        first.send_signal(ending)
        output, _ = first.communicate(timeout=WAIT_S)
    assert first.returncode == code
    assert ("stopped: 7 of 10 are finished; run the same command to continue" in output) == (ending == signal.SIGINT)
    assert not (out / "results.json").exists()
    assert CliRunner().invoke(app, ["eval", "report", str(out)]).exception is not None
    script.hold = 1_000_000
    assert "7 of 10 were finished before" in evaluate(questions, services, out, "--baselines", "direct")
    assert len(script.asked) == 8 + 3, "the one that hung, and the rest"
    assert len({(prompt.run_id, prompt.group_uid) for prompt in script.asked}) == 10
    assert read_results(out)["search", "capitals"]["questions"] == 5


def test_different_inputs_are_not_mixed(script: Scripted, services: list[str], questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(questions, services, out)

    def read_refusal(*more: str, file: Path = questions) -> str:
        command = ["eval", str(file), *services, "--policy", "running", "--out", str(out), *more]
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, UserError)
        return str(done.exception)

    other = write_questions(tmp_path / "other.parquet", split="dev")
    assert "holds an evaluation with other questions" in read_refusal(file=other)
    assert "holds an evaluation with seed = 1, not 2" in read_refusal("--seed", "2")
    script.serving.version = 8
    assert "with another policy under the name 'running'" in read_refusal()
    assert "--fresh" in read_refusal()
    evaluate(other, services, out, "--fresh")
    assert {row["uid"].split("/")[1] for row in pq.read_table(out / "results.parquet").to_pylist()} == {"dev"}


def test_a_comparison_is_paired_and_shows_changed_questions(
    script: Scripted, services: list[str], questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    script.says = lambda prompt, sample: (
        "Paris" if not prompt.environment and prompt.ground_truth.targets[0] == "Lima" else answer_from_passages(prompt)
    )
    evaluate(questions, services, out, "--baselines", "rag")
    done = CliRunner().invoke(
        app, ["eval", "compare", f"{out}:running/rag", f"{out}:running"], env={"COLUMNS": "160"}, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    means, outcomes = [line.split() for line in done.output.splitlines() if line.strip().startswith("capitals")]
    assert means[:4] == ["capitals", "0.800", "0.800", "+0.000"]
    assert outcomes == ["capitals", "5", "1", "1", "3", "0"]
    assert "Capital of Chad?" in done.output
    page = (out / "comparison.html").read_text()
    assert page.count('class="fold"') == 2
    assert "Capital of Peru?" in page
    assert "Capital of Italy?" not in page, "both were right"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no.parquet"], "data file no.parquet does not exist"),
        (["a=b"], "no questions"),
        (["{questions}", "--baselines", "direct,reg"], "names 'reg': expected some of direct, cot, rag, untrained"),
        (["{questions}", "--baselines", "untrained"], "give --untrained FOLDER"),
        (["{questions}", "--policy", "no/folder"], "no/folder does not exist: give a model folder, RUN@latest"),
        (["{questions}", "--policy", "https://host/v2"], "ends in /v1"),
        (["{questions}", "--policy", "models/tiny-policy"], "are already running at .*, and are not switched"),
        (["{questions}", "--policy", "running", "--policy", "running"], "two policies are called 'running'"),
        (["{questions}", "--samples", "2", "--temperature", "0"], "would all be the same"),
        (["compare", "{folder}", "{folder}"], "is no evaluation"),
        (["report", "{folder}"], "is no evaluation"),
        (["{questions}", "--fresh", "--out", "{folder}"], "is no evaluation, --fresh does not remove it"),
    ],
)
def test_invalid_requests_end_with_one_sentence(
    arguments: list[str],
    sentence: str,
    services: list[str],
    questions: Path,
    tmp_path: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(repository)
    filled = [text.format(questions=questions, folder=tmp_path) for text in arguments]
    more = services if filled[0] not in ("compare", "report") else []
    done = CliRunner().invoke(app, ["eval", *filled, *more])
    assert isinstance(done.exception, UserError), done.output
    with pytest.raises(UserError, match=sentence):
        raise done.exception


def test_the_policy_running_needs_running_services(questions: Path, free_base_port: Callable[[], int]) -> None:
    done = CliRunner().invoke(
        app, ["eval", str(questions), "--policy", "running", "--base-port", str(free_base_port())]
    )
    with pytest.raises(UserError, match=r"no services are running at .*: start them with 'forage up'"):
        raise done.exception or AssertionError(done.output)
