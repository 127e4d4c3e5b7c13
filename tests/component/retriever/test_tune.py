"""Tuning of a real index: settings that load, and sentences where nothing can be gained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from forage_retriever.command import evaluate, tune
from forage_retriever.command.fusion import Fusion
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index.build import build_index
from forage_retriever.index.recipe import Recipe
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import RetrievalMode, RetrieverSettings, load_settings

WORDS = ("harbour", "glacier", "violin", "copper", "lantern", "orchard", "compass", "marble")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    rows = [{"id": str(n), "contents": f'"T{n}"\n{word} number {n}'} for n, word in enumerate(WORDS * 8)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"question": f"where is number {n}", "gold_ids": [str(n)]} for n in range(len(rows))]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return folder


def build(folder: Path, name: str, encoder: Encoder, **changes: object) -> Path:
    if not (folder / name).exists():
        settings = RetrieverSettings.model_validate({"mode": "hybrid", **changes})
        recipe = Recipe.from_settings(settings, encoder, "float16" if changes else None)
        build_index(folder / name, folder / f".{name}", folder / "corpus.jsonl", recipe, lambda *_: None)
    return folder / name


def test_tuning_prints_settings_that_load(
    corpus: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BM25 finds every number, so with almost no weight of its own it must gain weight."""
    monkeypatch.setattr(evaluate, "SECONDS", 0.01)
    index, out = build(corpus, "cells", encoder, faiss_factory="IVF4,SQ8"), corpus / "new" / "tuned.yaml"
    settings = RetrieverSettings(bm25_weight=0.0, nprobe=1)
    tune.tune_index(index, corpus / "questions.jsonl", settings, 0.9, out, as_json=True)
    report = json.loads(capsys.readouterr().out)
    hybrid, vectors = report["hybrid"], report["vectors"]
    assert (report["tuned_on"], report["held_out"]) == (32, 32)
    assert hybrid["interval"][0] > 0 < hybrid["gain"]
    assert hybrid["quality"]["chosen"]["hit@1"] > hybrid["quality"]["present"]["hit@1"]
    assert vectors["chosen"]["top10"] >= 0.9 > vectors["present"]["top10"]
    tuned = load_settings(out, environ={}).retriever
    assert tuned.bm25_weight == report["settings"]["bm25_weight"] > 0
    assert tuned.nprobe == report["settings"]["nprobe"] > 1


def test_a_gain_within_noise_changes_nothing(
    corpus: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]
) -> None:
    index, out = build(corpus, "flat", encoder), corpus / "same.yaml"
    best = RetrieverSettings(bm25_weight=1.0, dense_weight=0.25, rrf_k=1)
    tune.tune_index(index, corpus / "questions.jsonl", best, 0.9, out)
    printed = capsys.readouterr().out
    assert "within noise, so nothing changes" in printed
    assert "the present settings stay" in printed
    assert yaml.safe_load(out.read_text()) == {}
    assert load_settings(out, environ={}).retriever == RetrieverSettings()


def test_a_fusion_that_finds_less_is_not_recommended(
    corpus: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prefer_vectors(judged: Sequence[object], fusion: Fusion) -> NDArray[np.float64]:
        return np.full(len(judged), fusion.dense_weight - fusion.bm25_weight)

    found = iter([1.0, 0.9, 0.9, 1.0])  # present, chosen, and each ranking alone
    monkeypatch.setattr(tune, "score_fusion", prefer_vectors)
    monkeypatch.setattr(tune, "_measure", lambda *_: dict.fromkeys(tune._SHOWN, next(found)))
    index = build(corpus, "flat", encoder)
    tune.tune_index(index, corpus / "questions.jsonl", RetrieverSettings(bm25_weight=1.0, dense_weight=0.1))
    printed = " ".join(capsys.readouterr().out.split())
    assert "recall@10 falls from 1.0000 to 0.9000, so nothing changes" in printed
    assert "the present settings stay" in printed


@pytest.mark.parametrize(("recall", "nprobe"), [(None, None), (0.01, 1)])
def test_a_vector_search_that_finds_less_is_recommended_only_if_asked_for(
    recall: float | None,
    nprobe: int | None,
    corpus: Path,
    encoder: Encoder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    efforts = [{"ef_search": None, "nprobe": n, "refine": None, "top10": 1.0, "qps": 9.0 / n} for n in (1, 4)]
    monkeypatch.setattr(tune, "measure_efforts", lambda *_: efforts)
    index = build(corpus, "cells", encoder, faiss_factory="IVF4,SQ8")
    best = RetrieverSettings(bm25_weight=1.0, dense_weight=0.25, rrf_k=1, nprobe=4)
    tune.tune_index(index, corpus / "questions.jsonl", best, recall, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["vectors"]["chosen"]["top10"] < report["vectors"]["present"]["top10"]
    assert report["settings"].get("nprobe") == nprobe
    assert ("so nothing changes" in report["vectors"]["verdict"]) == (nprobe is None)


def test_what_cannot_be_tuned_is_said_in_a_sentence(corpus: Path, encoder: Encoder, tmp_path: Path) -> None:
    flat, words = build(corpus, "flat", encoder), tmp_path / "words"
    recipe = Recipe.from_settings(RetrieverSettings(mode=RetrievalMode.BM25), None, "")
    build_index(words, tmp_path / ".words", corpus / "corpus.jsonl", recipe, lambda *_: None)
    asked = corpus / "questions.jsonl"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(asked.read_text().splitlines(keepends=True)[:3]))
    other = tmp_path / "other.jsonl"
    other.write_text(asked.read_text().replace('["', '["x'))
    with pytest.raises(DataError, match=r"few.jsonl: 3 are too few .* give 20 or more"):
        tune.tune_index(flat, few, RetrieverSettings(), 0.9)
    with pytest.raises(DataError, match="no gold passage was found at all"):
        tune.tune_index(flat, other, RetrieverSettings(), 0.9)
    with pytest.raises(SettingsError, match=r"--out .* is a folder: give a file"):
        tune.tune_index(flat, asked, RetrieverSettings(), 0.9, tmp_path)
    with pytest.raises(SettingsError, match="words has nothing to tune: its vector search is exact"):
        tune.tune_index(words, asked, RetrieverSettings(), 0.9)
