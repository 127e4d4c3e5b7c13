"""Pages about trajectories: filters, orders, text, export, one trajectory, steps and groups, of real step files."""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from console_client import ConsoleClient
from run_folders import write_run
from step_runs import build_step_row, write_steps

from forage_records.step_file import read_step
from forage_records.trajectory_file import read_trajectories
from forage_records.trajectory_rows import read_step_rows as read_rows

LIST = "/runs/one/trajectories"
SPANS = [
    {"role": "prompt", "text": "Question: Who?"},
    {"role": "model", "text": "<search> x </search>"},
    {"role": "env", "text": "quince jam"},
    {"role": "model", "text": "<answer> Bo </answer>"},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 10: group 1 with rewards 1 and 0, and a failed sample of group 2; step 20: one of HotpotQA; a validation."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    rows = [
        build_step_row(10, "nq/train/1/0", 0, advantages=[2.0, 1.0, 0.0, 0.0, -1.0, -1.0]),
        build_step_row(10, "nq/train/1/0", 1, reward=0.0, right=False, text="the quick brown fox"),
        build_step_row(10, "nq/train/2/0", 0, reward=None, searches=0),
        build_step_row(
            20, "hotpotqa/train/3/0", 0, reward=0.5, versions=(17, 19), truncated=True, question="Brown what?"
        ),
    ]
    answers = [
        {"uid": f"nq/test/{number}/0", "question": "Who?", "targets": ["Bo"], "failed": False, "em": float(number == 0),
         "reward": 0.5, "answer": "Bo", "finished": True, "truncated": False, "trace_id": "", "spans": SPANS,
         "turns": [{"index": 1, "action": "ACTION_KIND_SEARCH", "content": "x"}, {"index": 2, "unknown": 1}]}
        for number in range(2)
    ]  # fmt: skip
    new = answers[0] | {
        "sample": 1, "reward_name": "made", "detail": "exact", "status": "TIMEOUT", "reason": "no reward: TIMEOUT",
        "components": [{"name": "em", "raw": 1.0, "weighted": 1.0}], "replica": "r0", "response_tokens": 9,
        "policy_version": 4, "policy_version_min": 3,
        "timings": dict.fromkeys(("queued_s", "retrieve_s", "score_s", "total_s"), 1.0) | {"generate_s": 2.0},
    }  # fmt: skip
    foreign = {
        "uid": 3,
        "sample": "x",
        "timings": 1,
        "components": 5,
        "turns": 7,
        "status": 1,
        "policy_version": 2.5,
        "em": "right",
    }
    metrics = [{"step": 10, "reward_mean": 0.5, "seconds": {"update": 2.0}, "guards": ["kl"]}, {"step": 11}]
    write_run(folder, {"before": answers, "step-20": answers, "after": [new, foreign]}, metrics)
    (folder / "settings.yaml").write_text(
        "model: {path: /nowhere}\ntrainer: {algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: true}}\n"
    )
    write_steps(folder, rows, dropped=["nq/train/9/0"])
    return folder


@pytest.fixture(scope="module")
def client(run: Path) -> ConsoleClient:
    own = ConsoleClient(run.parent)
    # The first answer may come before the table has every file.
    assert any(own.read(LIST)["loaded"] == 1.0 for _ in range(100_000)), "the table never has every file"
    return own


def name_rows(page: dict[str, Any]) -> str:
    return " ".join(f"{row['place']}:{row['row']}" for row in page["rows"])


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ({}, "step-20:0 step-10:0 step-10:1 step-10:2"),
        ({"order": "ascending"}, "step-10:0 step-10:1 step-10:2 step-20:0"),
        ({"step_max": 19}, "step-10:0 step-10:1 step-10:2"),
        ({"step_min": 11}, "step-20:0"),
        ({"place": "step-10", "source": "nq"}, "step-10:0 step-10:1 step-10:2"),
        ({"source": ["hotpotqa", "triviaqa"]}, "step-20:0"),
        ({"reward_min": 0.5, "sort": "reward"}, "step-10:0 step-20:0"),
        ({"reward_max": 0.5, "sort": "reward", "order": "ascending"}, "step-10:1 step-20:0"),
        ({"status": "TIMEOUT"}, "step-10:2"),
        ({"reason": "failed: the retriever did not answer"}, "step-10:2"),
        ({"right": False}, "step-10:1"),
        ({"trained": False}, "step-10:2"),
        ({"truncated": True}, "step-20:0"),
        ({"finished": False}, ""),
        ({"searches_max": 0}, "step-10:2"),
        ({"version_min": 18}, "step-20:0"),
        ({"version_max": 16}, "step-10:0 step-10:1 step-10:2"),
        ({"version_min": 16, "version_max": 17}, "step-20:0"),
        ({"uid": "nq/train/1/0"}, "step-10:0 step-10:1"),
        ({"uid": "nq/train/1/"}, "step-10:0 step-10:1"),
        ({"sort": "search_advantage", "limit": 2}, "step-10:0 step-20:0"),
        ({"sort": "advantage", "order": "ascending", "offset": 2}, "step-10:1 step-10:2"),
        ({"text": "brown"}, "step-20:0 step-10:1"),
        ({"text": "QUICK Brown"}, "step-10:1"),
        ({"text": '"brown fox"'}, "step-10:1"),
        ({"text": '"fox brown"'}, ""),
        ({"text": "bro"}, ""),
        ({"text": "bro*", "source": "nq"}, "step-10:1"),
        ({"text": "?! ..."}, "step-20:0 step-10:0 step-10:1 step-10:2"),
        ({"text": '\' OR 1=1 -- " NEAR("a") col:x^'}, ""),
        ({"place": "before"}, "before:0 before:1"),
        ({"place": "before", "right": True, "text": "jam"}, "before:0"),
        ({"place": "validation-step-20", "text": "quince"}, "validation-step-20:0 validation-step-20:1"),
        ({"place": "nothing"}, ""),
        ({"source": "' OR '1'='1"}, ""),
    ],
)
def test_rows_are_filtered_and_sorted(client: ConsoleClient, query: dict[str, Any], rows: str) -> None:
    page = client.read(LIST, **query)
    assert name_rows(page) == rows
    if not {"limit", "offset"} & query.keys():
        assert page["total"] == len(rows.split())
    everything = {"before": 2, "validation-step-20": 2, "step-10": 3, "nothing": 0}.get(query.get("place", ""), 4)
    assert (page["all"], page["loaded"]) == (everything, 1.0)


def test_a_row_has_all_that_a_table_shows(client: ConsoleClient) -> None:
    (row,) = client.read(LIST, truncated=True, text="known brown")["rows"] or client.read(LIST, truncated=True)["rows"]
    assert (row["question"], row["answer"], row["targets"], row["versions"]) == (
        "Brown what?",
        "Ann",
        ["Ann"],
        [17, 19],
    )
    assert (row["tokens"], row["turns"], row["mismatch"], row["advantage"]) == (6, 2, 0.25, 0.5)
    (found,) = client.read(LIST, text="quick")["rows"]
    assert found["snippet"].endswith("<information>the quick brown fox</information><answer> Ann </answer>")


def test_facets_are_the_values_that_there_are(client: ConsoleClient) -> None:
    found = client.read("/runs/one/facets")
    assert found["places"] == ["after", "before", "validation-step-20", "step-10", "step-20"]
    assert found["sources"] == {"nq": 3, "hotpotqa": 1}
    assert found["statuses"] == {"OK": 3, "TIMEOUT": 1}
    assert found["reasons"] == {"failed: the retriever did not answer": 1}
    assert (found["steps"], found["versions"]) == ({"low": 10.0, "high": 20.0}, {"low": 9.0, "high": 19.0})
    assert client.read("/runs/one/facets", place="before")["all"] == 2


def test_a_selection_is_a_file_that_forage_reads_again(client: ConsoleClient, run: Path, tmp_path: Path) -> None:
    reply = client.ask("/runs/one/trajectories.parquet", reward_min=0.0, source=["nq", "hotpotqa"])
    assert reply.headers["content-disposition"] == "attachment; filename*=utf-8''one-trajectories.parquet"
    file = tmp_path / "chosen.parquet"
    file.write_bytes(reply.content)
    stored = [row for step in (10, 20) for row in read_step(run / f"trajectories/step-{step:06d}.parquet")]
    assert list(read_step(file)) == [stored[0], stored[1], stored[3]]
    assert [t.group_uid for t in read_trajectories(file)][-1] == "hotpotqa/train/3/0"
    assert [row["question"] for row in read_rows(file)][-1] == "Brown what?", "as forage trajectories reads it"
    assert b"forage.groups" not in pq.read_schema(BytesIO(reply.content)).metadata


def test_what_cannot_be_exported_is_said(client: ConsoleClient) -> None:
    assert "nothing to export" in client.read_problem("/runs/one/trajectories.parquet", 422, text="nowhere")
    assert "no step files to export" in client.read_problem("/runs/one/trajectories.parquet", 422, place="before")


def test_a_trajectory_has_its_tokens_and_why_they_were_reinforced(client: ConsoleClient) -> None:
    found = client.read(f"{LIST}/step-10/0")
    assert found["tokens"]["text"] == [f"<{number}>" for number in range(1, 7)], "the model is gone"
    assert found["tokens"]["advantage"] == [2.0, 1.0, None, None, -1.0, -1.0]
    assert found["tokens"]["mismatch"] == [0.0, -0.25, None, None, 0.0, 0.0]
    assert found["tokens"]["version"] == [9, 9, None, None, 9, 9]
    assert found["tokens"]["turn"] == [1, 1, None, None, 2, 2]
    assert found["tokens"]["kl"][-1] == pytest.approx(0.36788)
    assert found["tokens"]["value"] is None
    blocks = [(block["author"], block["begin"], block["end"], block["turn"]) for block in found["blocks"]]
    assert blocks == [("prompt", None, None, None), ("model", 0, 2, 1), ("env", 2, 4, 1), ("model", 4, 6, 2)]
    search = found["turns"][0]
    assert [(one["title"], one["gold"]) for one in search["passages"]] == [("Ann", True), ("x", False)]
    assert (search["action"], search["advantage"], found["turns"][1]["advantage"]) == ("search", 1.5, -1.0)
    assert (found["estimator"], found["baseline"], found["deviation"]) == ("grpo", 0.5, 0.70711)
    assert (found["previous"], found["next"]) == (None, {"place": "step-10", "row": 1})
    assert found["group"] == [{"place": "step-10", "row": 0}, {"place": "step-10", "row": 1}]
    assert found["judgement"]["components"] == [{"name": "em", "raw": 1.0, "weighted": 1.0}]
    assert client.read(f"{LIST}/step-10/2")["next"] is None


def test_a_trajectory_of_a_validation_has_what_its_file_has(client: ConsoleClient) -> None:
    found = client.read(f"{LIST}/validation-step-20/1")
    assert (found["tokens"], found["timings"], found["judgement"]["total"]) == (None, None, 0.5)
    assert [block["author"] for block in found["blocks"]] == ["prompt", "model", "env", "model"]
    assert [turn["action"] for turn in found["turns"]] == ["search", "unspecified"]
    assert found["summary"]["em"] == 0.0
    assert (found["judgement"]["components"], found["validation"]["total"]) == ([], 0.0)


def test_a_validation_of_now_has_components_times_and_versions(client: ConsoleClient) -> None:
    found = client.read(f"{LIST}/after/0")
    assert found["judgement"]["components"] == [{"name": "em", "raw": 1.0, "weighted": 1.0}]
    assert (found["judgement"]["reward"], found["judgement"]["detail"]) == ("made", "exact")
    assert (found["timings"]["generate_s"], found["replica"]) == (2.0, "r0")
    assert (found["summary"]["versions"], found["summary"]["tokens"], found["summary"]["sample"]) == ([3, 4], 9, 1)
    assert found["summary"]["reason"] == "no reward: TIMEOUT"
    assert client.read(f"{LIST}/after/1")["timings"] is None, "the file is of another version"


def test_what_a_validation_says_besides_the_texts_is_shown(tmp_path: Path) -> None:
    answer = {
        "uid": "nq/test/1/0", "data_source": "nq", "question": "Who?", "targets": ["Bo"], "failed": False, "em": 1.0,
        "reward": 1.2, "reward_name": "own", "detail": "the answer is right", "status": "OK", "reason": None,
        "components": [{"name": "em", "raw": 1.0, "weighted": 1.0}, {"name": "format", "raw": 0.4, "weighted": 0.2}],
        "timings": {"queued_s": 0.5, "generate_s": 1.5, "retrieve_s": 0.25, "score_s": 0.0, "total_s": 2.25},
        "response_tokens": 17, "policy_version": 4, "policy_version_min": 3, "replica": "r1", "turns": [],
        "spans": SPANS,
    }  # fmt: skip
    odd = answer | {"components": 3, "timings": "soon", "replica": None}
    (tmp_path / "two").mkdir()
    write_run(tmp_path / "two", {"watch-3": [answer, odd]}, [{"step": 4}])
    client = ConsoleClient(tmp_path)
    found = client.read("/runs/two/trajectories/watch-3/0")
    assert found["judgement"] == {
        "reward": "own", "status": "OK", "total": 1.2, "detail": "the answer is right",
        "components": answer["components"],
    }  # fmt: skip
    assert found["timings"] == answer["timings"]
    assert (found["replica"], found["temperature"], found["validation"]["total"]) == ("r1", 0.0, 1.0)
    assert (found["summary"]["tokens"], found["summary"]["versions"]) == (17, [3, 4])
    damaged = client.read("/runs/two/trajectories/watch-3/1")
    assert (damaged["timings"], damaged["judgement"]["components"], damaged["judgement"]["total"]) == (None, [], 1.2)


@pytest.mark.parametrize("address", ["step-10/3", "step-99/0", "nothing/0", f"step-10/{2**40}", "step-1000000000000/0"])
def test_an_address_without_a_trajectory_says_so(client: ConsoleClient, address: str) -> None:
    assert client.read_problem(f"{LIST}/{address}", 404).startswith("there is no ")


def test_a_step_lists_its_groups_by_the_spread_of_rewards(client: ConsoleClient) -> None:
    found = client.read("/runs/one/steps/10")
    assert (found["version"], found["trajectories"], found["next"], found["previous"]) == (9, 4 - 1, 20, None)
    assert (found["metrics"], found["seconds"], found["guards"]) == ({"reward_mean": 0.5}, {"update": 2.0}, ["kl"])
    groups = [(one["uid"], one["state"], one["spread"], one["rewards"]) for one in found["groups"]]
    assert groups == [
        ("nq/train/1/0", "trained", 1.0, [1.0, 0.0]),
        ("nq/train/2/0", "failed", None, [None]),
        ("nq/train/9/0", "dropped", None, []),
    ]
    assert found["groups"][1]["reason"] == "failed: the retriever did not answer"
    assert sum(one["count"] for one in found["advantages"]) == 8
    assert (found["advantages"][0]["low"], found["advantages"][-1]["high"]) == (-1.0, 2.0)


def test_a_step_without_a_file_has_its_metrics(client: ConsoleClient) -> None:
    found = client.read("/runs/one/steps/11")
    assert (found["is_saved"], found["groups"], found["previous"], found["next"]) == (False, [], 10, 20)
    assert "it has not been taken" in client.read_problem("/runs/one/steps/12", 404)


def test_a_group_shows_its_samples_side_by_side(client: ConsoleClient) -> None:
    found = client.read(f"/runs/one/groups/step-10/{quote('nq/train/1/0', safe='')}")
    assert [sample["summary"]["row"] for sample in found["samples"]] == [0, 1]
    assert (found["baseline"], found["deviation"], found["state"]) == (0.5, 0.70711, "trained")
    assert "there is no group" in client.read_problem("/runs/one/groups/step-10/nq/train/7/0", 404)
    watched = client.read("/runs/one/groups/before/nq/test/0/0")
    assert (len(watched["samples"]), watched["estimator"]) == (1, None)


def test_numbers_that_json_lacks_are_unknown(tmp_path: Path) -> None:
    run = tmp_path / "one"
    run.mkdir()
    write_run(run, {}, [])
    rows = [build_step_row(1, advantages=[float("nan"), float("inf"), 0.0, 0.0, 1.0, 1.0])]
    write_steps(run, rows)
    client = ConsoleClient(tmp_path)
    assert json.dumps(client.read(f"{LIST}/step-1/0"), allow_nan=False)
    assert client.read(f"{LIST}/step-1/0")["tokens"]["advantage"] == [None, None, None, None, 1.0, 1.0]
    assert client.read(LIST)["total"] == 1
    assert sum(one["count"] for one in client.read("/runs/one/steps/1")["advantages"]) == 2


@pytest.mark.parametrize(
    "query",
    [
        {"step_min": 2**64},
        {"offset": -1},
        {"limit": 501},
        {"reward_min": "high"},
        {"sort": "place; DROP"},
        {"unknown": 1},
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(client: ConsoleClient, query: dict[str, Any]) -> None:
    assert next(iter(query)) in client.read_problem(LIST, 422, **query)


@pytest.mark.parametrize("name", ["läuf", "実験 1", 'a"b', "a\nb"])
def test_a_selection_is_named_after_any_run(tmp_path: Path, name: str) -> None:
    write_steps(tmp_path / name, [build_step_row(1)])
    reply = ConsoleClient(tmp_path).ask(f"/runs/{quote(name)}/trajectories.parquet")
    named = f"attachment; filename*=utf-8''{quote(name)}-trajectories.parquet"
    assert (reply.status_code, reply.headers["content-disposition"]) == (200, named)


@pytest.mark.parametrize("trace_id", ["../../x?a=b#c", "@evil.example/", "\u2028\"'><b>", "{trace_id}"])
def test_a_trace_id_of_a_file_only_fills_its_place_in_the_address(tmp_path: Path, trace_id: str) -> None:
    row = {"uid": "nq/test/0/0", "question": "Who?", "em": 0.0, "trace_id": trace_id, "spans": SPANS}
    (tmp_path / "one").mkdir()
    write_run(tmp_path / "one", {"before": [row]}, [])
    client = ConsoleClient(tmp_path, "https://tempo.example/trace/{trace_id}/spans?of=forage")
    address = client.read(f"{LIST}/before/0")["trace_url"]
    assert re.fullmatch(r"https://tempo\.example/trace/[\w.%~-]+/spans\?of=forage", address)
