"""Retrieval metrics; sweeps and benchmarks of a real index."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from forage_retriever.command import bench, evaluate
from forage_retriever.command.questions import GoldQuestion, read_questions
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index.build import build_index
from forage_retriever.index.recipe import Recipe
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import RetrievalMode, RetrieverSettings

SWEPT = ("SQ4", "IVF2,SQ4", "HNSW4")


@pytest.mark.parametrize(
    ("gold", "ids", "want"),
    [
        (["a"], ["a", "x"], {"recall@1": 1, "hit@1": 1, "all@1": None, "mrr": 1}),
        (["a"], ["x", "y", "z", "a"], {"recall@3": 0, "hit@3": 0, "hit@10": 1, "mrr": 0.25}),
        (["a", "b"], ["a", "x", "b"], {"recall@1": 0.5, "hit@1": 1, "all@1": 0, "recall@3": 1, "all@3": 1}),
        (["a", "b"], [], {"recall@10": 0, "hit@10": 0, "all@10": 0, "mrr": 0}),
    ],
)
def test_metrics_of_one_question(gold: list[str], ids: list[str], want: dict[str, float | None]) -> None:
    metrics = evaluate.compute_metrics([GoldQuestion("?", frozenset(gold), "")], [ids])
    assert {name: metrics[name] for name in want} == want


def test_metrics_are_means_and_all_at_k_counts_only_questions_with_several_gold_passages() -> None:
    questions = [GoldQuestion("?", frozenset(gold), "") for gold in ("a", "ab", "ab", "ab")]
    metrics = evaluate.compute_metrics(questions, [["x"], ["a", "b"], ["a"], ["x", "y", "z", "b"]])
    assert metrics["hit@10"] == 3 / 4
    assert metrics["recall@10"] == (0 + 1 + 0.5 + 0.5) / 4
    assert metrics["all@10"] == 1 / 3
    assert metrics["mrr"] == (0 + 1 + 1 + 1 / 4) / 4


def test_overlap_is_the_share_of_the_exact_rows_that_were_found() -> None:
    exact = np.array([[1, 2, 3], [4, 5, 6]])
    assert evaluate.compute_overlap(np.array([[3, 1, -1], [6, 5, 4]]), exact) == 5 / 6


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "questions.jsonl:2 is not JSON"),
        ("[]", "questions.jsonl:2: field 'question' is None"),
        ('{"question": " ", "gold_ids": ["1"]}', "field 'question' is ' '"),
        ('{"question": "who?", "gold_ids": []}', r"field 'gold_ids' is \[\]"),
        ('{"question": "who?", "gold_ids": "1"}', "field 'gold_ids' is '1'"),
    ],
)
def test_a_malformed_question_is_named_with_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(f'{{"question": "who?", "gold_ids": [1]}}\n{line}\n')
    with pytest.raises(DataError, match=sentence):
        read_questions(file)


def test_questions_are_read_from_gzip(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.write('{"question": "who?", "gold_ids": [7, "a"], "source": "nq"}\n\n')
    assert read_questions(file) == [GoldQuestion("who?", frozenset({"7", "a"}), "nq")]
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(file)
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")


@pytest.fixture
def index(tmp_path: Path, corpus_file: Path, encoder: Encoder, request: pytest.FixtureRequest) -> Path:
    """The small corpus in the type of index that the test's parameter names; "bm25" is without vectors."""
    factory = getattr(request, "param", "SQ4")
    settings = RetrieverSettings(faiss_factory=factory if factory != "bm25" else "Flat")
    if factory == "bm25":
        settings = settings.model_copy(update={"mode": RetrievalMode.BM25})
    recipe = Recipe.from_settings(
        settings, None if factory == "bm25" else encoder, "float16" if factory != "bm25" else ""
    )
    out = tmp_path / "index"
    build_index(out, tmp_path / ".building", corpus_file, recipe, lambda *_: None)
    return out


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        {"question": "Which money do they use in Norway?", "gold_ids": ["n"], "source": "one"},
        {"question": "What is the capital of Norway?", "gold_ids": ["n", "o"], "source": "two"},
        {"question": "Kandi", "gold_ids": [7], "source": "one"},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("index", SWEPT, indirect=True)
def test_an_index_is_measured_by_mode_source_and_effort(
    index: Path,
    questions: Path,
    tmp_path: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evaluate, "SECONDS", 0.01)
    for name, efforts in (("EF_SEARCH", (16, 64)), ("NPROBE", (1, 2)), ("REFINE", (1, 20))):
        monkeypatch.setattr(evaluate, name, efforts)
    settings = RetrieverSettings(cache_dir=repository / ".cache/retriever")
    evaluate.evaluate_index(index, questions, settings, tmp_path / "report", sweep=True)
    report = json.loads((tmp_path / "report/eval.json").read_text())
    assert "queries/s" in capsys.readouterr().out
    assert set(report["quality"]) == {"bm25", "dense", "hybrid"}
    assert set(report["quality"]["bm25"]) == {"all", "one", "two"}
    assert report["quality"]["bm25"]["all"]["hit@10"] == 1
    assert report["quality"]["hybrid"]["two"]["all@3"] == 1
    assert max(point["top10"] for point in report["sweep"]) > 0.99
    assert all(point["qps"] > 0 for point in report["sweep"])
    image = ElementTree.parse(tmp_path / "report/sweep.svg").getroot()
    texts = {text.text for text in image.iter("{http://www.w3.org/2000/svg}text")}
    refined = {f"refine {refine}" for refine in evaluate.REFINE}
    assert texts >= {"queries per second"} | (
        refined if evaluate._list_varied(report["sweep"]) != ["refine"] else {"refine"}
    )


@pytest.mark.parametrize("index", ["bm25"], indirect=True)
def test_unsuitable_indexes_and_questions_are_refused(index: Path, questions: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="a sweep measures vector search"):
        evaluate.evaluate_index(index, questions, RetrieverSettings(), sweep=True)
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "Norway", "gold_ids": ["of another corpus"]}\n')
    with pytest.raises(DataError, match="are gold_ids ids of this index's corpus"):
        evaluate.evaluate_index(index, other, RetrieverSettings())


@pytest.mark.parametrize("index", ["bm25"], indirect=True)
def test_figures_are_a_table_or_json(index: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.evaluate_index(index, questions, RetrieverSettings())
    assert "{" not in capsys.readouterr().out
    evaluate.evaluate_index(index, questions, RetrieverSettings(), as_json=True)
    assert set(json.loads(capsys.readouterr().out)) == {"quality"}


@pytest.mark.parametrize("index", ["bm25"], indirect=True)
def test_a_benchmark_reports_speed_and_memory(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.benchmark_index(index, RetrieverSettings(), seconds=0.01)
    assert "{" not in capsys.readouterr().out
    bench.benchmark_index(index, RetrieverSettings(), seconds=0.01, as_json=True)
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    assert isinstance(rows, list)
    assert [row["batch"] for row in rows] == list(bench.BATCHES)
    assert all(row["qps"] > 0 and row["p99_ms"] >= row["p50_ms"] > 0 for row in rows)
    assert isinstance(report["rss"], int)


def test_batches_go_through_the_items_in_turn() -> None:
    seen: list[Sequence[int]] = []
    metrics = bench.measure_throughput(seen.append, list(range(10)), 4, seconds=1e-6)
    assert seen[:2] == [[0, 1, 2, 3]] * 2  # the first does not count
    assert metrics["qps"] > 0
    assert len(seen[-1]) == 4
