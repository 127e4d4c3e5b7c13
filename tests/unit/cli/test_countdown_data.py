"""Countdown problems and the knowledge graph as files: layout, splits, repeatability and invalid arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from forage_cli.commands.data import app
from forage_cli.datasets import countdown
from forage_cli.datasets.world import knowledge_graph
from forage_cli.datasets.world.facts import load_facts
from forage_cli.datasets.world.questions import SPLITS
from forage_runtime.errors import UserError

COUNTS = {"train": 300, "test": 40}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, countdown.CountdownSummary]:
    out = tmp_path_factory.mktemp("countdown")
    return out, countdown.build_countdown(out, COUNTS, [3, 4], 99, seed=0)


def test_rows_have_the_layout_of_the_specification(problems: tuple[Path, countdown.CountdownSummary]) -> None:
    seen = set()
    for split, count in COUNTS.items():
        rows = pq.read_table(problems[0] / f"{split}.parquet").to_pylist()
        assert len(rows) == count
        for index, row in enumerate(rows):
            assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
            assert row["data_source"] == "countdown"
            truth = row["reward_model"]["ground_truth"]
            assert row["reward_model"]["style"] == "rule"
            assert list(truth) == ["target", "numbers"]
            (message,) = row["prompt"]
            assert message["role"] == "user"
            assert (
                f"the numbers {', '.join(map(str, truth['numbers']))} that equals {truth['target']}."
                in message["content"]
            )
            assert "<answer> (1 + 2) / 3 </answer>" in message["content"]
            assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, index)
            seen.add((truth["target"], *sorted(truth["numbers"])))
    assert len(seen) == sum(COUNTS.values()), "a problem occurs twice"


def test_the_same_seed_gives_the_same_files_and_the_manifest_names_them(
    problems: tuple[Path, countdown.CountdownSummary], tmp_path: Path
) -> None:
    out, summary = problems
    assert countdown.build_countdown(tmp_path / "again", COUNTS, [3, 4], 99, seed=0) == summary
    assert countdown.build_countdown(tmp_path / "other", COUNTS, [3, 4], 99, seed=1).digests != summary.digests
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["sha256"] == summary.digests
    for name, digest in summary.digests.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert (manifest["seed"], manifest["problems"], manifest["numbers"]) == (0, COUNTS, [3, 4])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--train", "0"], "--train is 0"),
        (["--test", "-1"], "--test is -1"),
        (["--numbers", "2,3"], "--numbers holds 2: a problem has 3 to 6 numbers"),
        (["--numbers", "3,3"], "give each size once"),
        (["--numbers", "three"], "--numbers is 'three'"),
        (["--max-target", "0"], "--max-target is 0"),
        (["--max-number", "1"], "--max-number is 1"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["countdown", "--out", str(tmp_path / "made"), *options])
    assert isinstance(done.exception, UserError)
    assert words in str(done.exception)
    assert not (tmp_path / "made").exists()


def test_asking_for_more_problems_than_exist_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(countdown, "_MAX_MISSES", 1000)
    with pytest.raises(UserError, match=r"no new problem after \d+ .*ask for fewer"):
        countdown.build_countdown(tmp_path, COUNTS, [3], 3, 0, max_number=2)


def test_the_command_prints_what_it_wrote(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["countdown", "--out", str(tmp_path), "--train", "30", "--test", "5"])
    assert done.exit_code == 0, done.output
    assert "problems: train 30, test 5" in done.output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["manifest.json", "test.parquet", "train.parquet"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, knowledge_graph.GraphSummary]:
    out = tmp_path_factory.mktemp("graph")
    return out, knowledge_graph.build_knowledge_graph(out, seed=0)


Rows = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def rows(graph: tuple[Path, knowledge_graph.GraphSummary]) -> Rows:
    return lambda split: pq.read_table(graph[0] / f"{split}.parquet").to_pylist()


def test_every_question_can_be_answered_from_the_graph(
    graph: tuple[Path, knowledge_graph.GraphSummary], rows: Rows
) -> None:
    lines = (graph[0] / "triples.jsonl").read_text(encoding="utf-8").splitlines()
    neighbours: dict[str, set[str]] = {}
    for line in lines:
        row = json.loads(line)
        neighbours.setdefault(row["head"], set()).add(row["tail"])
        neighbours.setdefault(row["tail"], set()).add(row["head"])
    assert len(lines) == len(set(lines)) == graph[1].triples
    for split in SPLITS:
        for row in rows(split):
            entities = row["extra_info"]["entities"]
            answer = row["reward_model"]["ground_truth"]["target"][0]
            for entity, following in zip(entities, [*entities[1:], answer], strict=True):
                assert following in neighbours[entity], row["extra_info"]["question"]


def test_questions_name_their_source_and_explain_the_tool(rows: Rows) -> None:
    for row in rows("test"):
        assert row["data_source"] == "knowledge_graph"
        content = row["prompt"][0]["content"]
        assert content == f"{knowledge_graph.PROMPT_PREFIX}{row['extra_info']['question']}\n"
        assert "<kg-query> get_tail_entities(France, capital) </kg-query>" in content


def test_the_graph_has_no_ambiguous_name() -> None:
    names = {name for triple in knowledge_graph.make_triples(load_facts()) for name in (triple.head, triple.tail)}
    assert all(name == name.strip() and len(name) < 200 for name in names)
    assert len({name.lower() for name in names}) == len(names)
