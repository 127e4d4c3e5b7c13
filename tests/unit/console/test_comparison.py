"""Two runs: settings that differ, questions won and lost, digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from console_client import ConsoleClient
from run_folders import write_run

from forage_records.statistics import paired_difference
from forage_runtime.settings import load_settings

Em = float | None


def build_answer(source: str, number: int, em: Em, epoch: int = 0) -> dict[str, Any]:
    uid = f"{source}/test/{number}/{epoch}"
    answer = {"answer": "right" if em else "wrong", "failed": em is None, "spans": []}
    question = {"uid": uid, "question": f"{source} question {number}", "targets": ["right"]}
    return question | answer | {"em": em, "reward": em}


def make_run(runs: Path, name: str, validations: Mapping[str, Sequence[Any]], *settings: str, **step: Any) -> None:
    (runs / name).mkdir(parents=True)
    steps = [{"step": number, "em_mean": 0.5} | step for number in (1, 2)]
    write_run(runs / name, validations, steps)
    (runs / name / "settings.yaml").write_text(load_settings(None, [f"run.id={name}", *settings]).to_yaml())


def build_answers(nq: Sequence[Em], hotpotqa: Sequence[Em] = (), epoch: int = 0) -> list[dict[str, Any]]:
    return [
        build_answer(source, number, em, epoch)
        for source, values in (("nq", nq), ("hotpotqa", hotpotqa))
        for number, em in enumerate(values)
    ]


NQ_A, NQ_B = (1.0, 0.0, 0.0, 1.0, 0.0, None), (1.0, 1.0, 1.0, 0.0, 0.0, 1.0)
HOT_A, HOT_B = (0.0, 0.0, 1.0), (1.0, 0.0, None)


@pytest.fixture
def client(tmp_path: Path) -> ConsoleClient:
    """Runs `a` and `b`, which share the validation `after`; each has another of its own."""
    a = {"after": build_answers(NQ_A, HOT_A), "before": build_answers((0.0, 0.0))}
    b = {"after": build_answers(NQ_B, HOT_B, epoch=3), "step-1": build_answers((1.0, 1.0))}
    make_run(tmp_path, "a", a, "rollout.n=4", tokens_digest="t", weights_digest="w")
    make_run(tmp_path, "b", b, "trainer.actor.optim.lr=0.5", tokens_digest="t", weights_digest="v", kl_ref=1.0)
    return ConsoleClient(tmp_path)


def test_settings_that_differ_are_listed(client: ConsoleClient) -> None:
    found = {one["name"]: (one["a"], one["b"]) for one in client.read("/compare", a="a", b="b")["settings"]}
    assert found == {"rollout.n": (4, 8), "trainer.actor.optim.lr": (1e-6, 0.5)}


def test_the_last_validation_of_both_is_compared_by_source_and_overall(client: ConsoleClient) -> None:
    found = client.read("/compare", a="a", b="b")
    assert (found["label_a"], found["label_b"]) == ("after", "after")
    assert (found["labels_a"], found["labels_b"]) == (["before", "after"], ["step-1", "after"])
    counts = [(one["data_source"], one["questions"]) for one in found["sources"]]
    assert counts == [("hotpotqa", 2), ("nq", 5), ("all", 7)]
    nq = found["sources"][1]
    assert nq["outcomes"] == {"won": 2, "lost": 1, "both": 1, "neither": 1}
    assert (nq["em_a"], nq["em_b"]) == (0.4, 0.6)
    want = paired_difference(NQ_A[:5], NQ_B[:5])  # type: ignore[arg-type]
    assert nq["difference"] == {"mean": want.mean, "low": want.low, "high": want.high, "p": want.p}
    assert (found["only_a"], found["only_b"]) == (1, 1), "what failed on one side is not compared"


def test_questions_are_paired_whatever_the_pass_over_the_data(client: ConsoleClient) -> None:
    found = client.read("/compare", a="a", b="b")
    assert found["total"] == len(found["pairs"]) == 7
    assert [pair["outcome"] for pair in found["pairs"]] == ["won", "won", "lost", "won", "both", "neither", "neither"]
    pair = found["pairs"][0]
    assert (pair["uid"], pair["question"], pair["targets"]) == ("nq/test/1", "nq question 1", ["right"])
    assert pair["a"] == {"run": "a", "place": "after", "row": 1, "answer": "wrong", "em": 0.0, "reward": 0.0}


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"outcome": "won"}, 3),
        ({"source": "hotpotqa"}, 2),
        ({"text": "NQ question"}, 5),
        ({"text": "question nq"}, 5),
        ({"text": "question 1"}, 2),
        ({"outcome": "won", "source": "nq", "text": "question 1"}, 1),
        ({"source": "unheard"}, 0),
    ],
)
def test_filters_keep_what_fits(client: ConsoleClient, query: dict[str, str], count: int) -> None:
    found = client.read("/compare", a="a", b="b", **query)
    assert found["total"] == len(found["pairs"]) == count
    assert found["sources"][-1]["questions"] == 7, "the comparison is of all questions"


def test_pages_follow_each_other(client: ConsoleClient) -> None:
    whole = client.read("/compare", a="a", b="b")["pairs"]
    pages = [client.read("/compare", a="a", b="b", offset=offset, limit=3) for offset in (0, 3, 6, 9)]
    assert [pair for page in pages for pair in page["pairs"]] == whole
    assert [page["total"] for page in pages] == [7] * 4


def test_validations_of_one_run_are_compared(client: ConsoleClient) -> None:
    found = client.read("/compare", a="a", b="a")
    assert (found["label_a"], found["label_b"], found["total"]) == ("before", "after", 2)
    assert (found["settings"], found["digests_equal"]) == ([], None)


def test_other_validations_can_be_chosen(client: ConsoleClient) -> None:
    found = client.read("/compare", a="a", b="b", label_b="step-1")
    assert (found["label_a"], found["label_b"], found["total"]) == ("after", "step-1", 2)
    problem = client.read_problem("/compare", 404, a="a", b="b", label_a="step-1")
    assert problem == "run 'a' has no validation 'step-1' (it has: before, after)"


def test_runs_without_validations_have_their_settings_compared(client: ConsoleClient, tmp_path: Path) -> None:
    make_run(tmp_path, "young", {})
    found = client.read("/compare", a="a", b="young")
    assert (found["label_b"], found["sources"], found["pairs"], found["digests_equal"]) == ("", [], [], None)
    assert "rollout.n" in [one["name"] for one in found["settings"]]


def test_digests_say_whether_runs_are_equal_to_the_bit(client: ConsoleClient, tmp_path: Path) -> None:
    make_run(tmp_path, "twin", {}, tokens_digest="t", weights_digest="w")
    found = client.read("/compare", a="a", b="twin")
    assert (found["digests_equal"], found["first_difference"]) == (True, None)
    found = client.read("/compare", a="a", b="b")
    assert (found["digests_equal"], found["first_difference"]) == (False, 1)
    assert found["metrics"] == ["em_mean"]


def test_several_samples_of_a_question_are_one_pair(tmp_path: Path) -> None:
    for name, values in (("a", (0.0, 0.0)), ("b", (1.0, 0.0))):
        make_run(tmp_path, name, {"after": [build_answer("nq", 7, em) for em in values]})
    found = ConsoleClient(tmp_path).read("/compare", a="a", b="b")
    assert [(pair["a"]["em"], pair["b"]["em"], pair["outcome"]) for pair in found["pairs"]] == [(0.0, 0.5, "won")]


def test_a_comparison_needs_two_runs(client: ConsoleClient) -> None:
    assert "there is no run 'c'" in client.read_problem("/compare", 404, a="a", b="c")
    assert client.read_problem("/compare", 422, a="a")
    assert client.read_problem("/compare", 422, a="a", b="b", limit=0)
    assert client.read_problem("/compare", 422, a="a", b="b", outcome="sideways")


def test_a_summary_is_no_question(client: ConsoleClient, tmp_path: Path) -> None:
    """A validation whose answers are not there is compared on nothing."""
    (tmp_path / "a/validation/after.jsonl").unlink()
    (tmp_path / "a/validation/after.json").write_text(json.dumps({"em": 0.5, "count": 4}))
    found = client.read("/compare", a="a", b="b")
    assert (found["total"], found["sources"], found["only_a"]) == (0, [], 0)
