"""`make bench-retriever-large`: its vectors, its laws on figures that follow them, and a small run of every type."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

SIZES = (125_000, 250_000, 500_000, 1_000_000)
WIKI18 = 21_015_324


@pytest.fixture
def bench(repository: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the benchmark, which are scripts of a folder."""
    monkeypatch.syspath_prepend(str(repository / "lab/benchmarks/retriever"))
    import large_bench
    import large_build
    import large_laws
    import large_measure
    import large_report
    import large_table
    import large_vectors

    return SimpleNamespace(
        main=large_bench,
        build=large_build,
        laws=large_laws,
        measure=large_measure,
        report=large_report,
        table=large_table,
        vectors=large_vectors,
    )


def find_kind(bench: SimpleNamespace, name: str) -> Any:
    return next(kind for kind in bench.build.KINDS if kind.name == name)


@pytest.fixture(scope="module")
def maker(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "lab/benchmarks/retriever"))
        import large_vectors

        return large_vectors.Maker()


def test_vectors_are_the_same_each_time_and_a_prefix_is_a_smaller_corpus(bench: SimpleNamespace, maker: Any) -> None:
    many = maker.draw_block(0, 3000)
    assert np.allclose(many[:1000], bench.vectors.Maker().draw_block(0, 1000), atol=1e-5)
    assert not np.allclose(many, maker.draw_block(1, 3000), atol=1e-2)
    assert np.linalg.norm(many, axis=1) == pytest.approx(1, abs=1e-5)


def test_vectors_have_no_near_copies_and_questions_find_their_passage(bench: SimpleNamespace, maker: Any) -> None:
    vectors = maker.draw_block(0, 4000)
    products = vectors @ vectors.T
    np.fill_diagonal(products, 0)
    assert products.max() < 0.9
    questions = maker.draw_questions(vectors[:-1:10], vectors[1::10][: len(vectors[:-1:10])])
    cosines = np.sum(questions * vectors[:-1:10], axis=1)
    mean, deviation = bench.vectors.ANSWER
    assert cosines.mean() == pytest.approx(mean, abs=0.03)
    assert cosines.std() == pytest.approx(deviation, abs=0.03)
    nearest = (questions @ vectors.T).argmax(axis=1)
    assert (nearest == np.arange(0, 3999, 10)).mean() > 0.85


def test_vectors_have_the_spectrum(bench: SimpleNamespace, maker: Any) -> None:
    vectors = np.concatenate([maker.draw_block(number, 4000) for number in range(2)])
    shares = np.linalg.eigvalsh(np.cov(vectors.T))[::-1]
    shares /= shares.sum()
    expected = bench.vectors.find_spectrum(768)
    assert shares[:8].sum() == pytest.approx(expected[:8].sum(), rel=0.2)
    assert shares[:128].sum() == pytest.approx(expected[:128].sum(), rel=0.05)
    assert 1 / (expected**2).sum() == pytest.approx(124, rel=0.05)  # effective dimensions, those of MiniLM's


def follow(bench: SimpleNamespace, name: str, coefficients: dict[str, float]) -> dict[int, Any]:
    """Results of a type whose seconds follow a law exactly."""
    kind = find_kind(bench, name)
    results = {}
    for size in SIZES:
        rows = []
        for effort in kind.efforts:
            features = bench.laws.list_search_features(kind, size, effort)
            seconds = sum(coefficients[feature] * amount for feature, amount in features.items())
            recall = 1.2 - 0.02 * math.log2(size)
            rows.append({"effort": effort, "single_s": 3 * seconds, "batch_s": seconds, "recall_3": recall})
        built = sum(1e-9 * amount for amount in bench.laws.list_build_features(kind, size).values())
        results[size] = {"rows": rows, "build_cpu_s": built}
    return results


@pytest.mark.parametrize(
    ("name", "coefficients"),
    [
        ("Flat", {"base": 1e-4, "passage": 2e-8}),
        ("IVF,SQ8", {"base": 1e-5, "cell": 4e-8, "code": 1e-7}),
        ("HNSW32_SQ8", {"base": 1e-4, "step": 4e-7}),
    ],
)
def test_a_law_is_found_and_extrapolated(bench: SimpleNamespace, name: str, coefficients: dict[str, float]) -> None:
    kind, results = find_kind(bench, name), follow(bench, name, coefficients)
    law = bench.laws.fit_search(kind, results, "batch_s")
    assert law.coefficients == pytest.approx(coefficients, rel=1e-3)
    assert abs(law.error) < 1e-6
    effort = kind.efforts[-1]
    row = bench.report.predict(kind, results, effort, WIKI18)
    features = bench.laws.list_search_features(kind, WIKI18, effort)
    expected = sum(coefficients[key] * amount for key, amount in features.items())
    assert row["batch_s"] == pytest.approx(expected, rel=1e-3)
    assert row["single_s"] == pytest.approx(3 * row["batch_s"], rel=1e-3)
    if name != "Flat":
        assert row["recall_3"] == pytest.approx(1.2 - 0.02 * math.log2(WIKI18), abs=1e-6)


def test_the_error_of_a_law_is_its_own_at_the_largest_size(bench: SimpleNamespace) -> None:
    kind, results = find_kind(bench, "Flat"), follow(bench, "Flat", {"base": 0.0, "passage": 2e-8})
    results[SIZES[-1]]["rows"][0]["batch_s"] *= 2
    assert bench.laws.fit_search(kind, results, "batch_s").error == pytest.approx(-0.5, abs=0.01)


def test_too_little_memory_or_disk_is_a_sentence_with_what_fits(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.main, "CACHE", tmp_path)
    kinds = [find_kind(bench, name) for name in ("Flat", "IVF,PQ192x4fs")]
    monkeypatch.setattr(bench.main, "measure_available_memory", lambda: 6 * 2**30)
    problem = bench.main.Bench(4_000_000, kinds).find_shortage()
    assert "building Flat over 4,000,000 vectors needs 12 GiB" in problem
    assert "--types IVF,PQ192x4fs" in problem
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: psutil.disk_usage("/")._replace(free=2**30))
    assert "GiB are free: free some, or give fewer passages" in bench.main.Bench(4_000_000, kinds).find_shortage()


@pytest.mark.parametrize("name", ["Flat", "IVF,PQ192x4fs", "HNSW32_SQ8"])
def test_a_type_is_built_grown_and_measured(bench: SimpleNamespace, maker: Any, tmp_path: Path, name: str) -> None:
    kind, vectors = find_kind(bench, name), maker.draw_block(0, 4000)
    np.save(tmp_path / "vectors.npy", vectors)
    questions = maker.draw_questions(np.asarray(vectors[:64]), np.asarray(vectors[1:65]))
    exact = np.argsort(-(questions @ vectors.T), axis=1)[:, :10]
    np.save(tmp_path / "questions.npy", questions)
    np.save(tmp_path / "exact.npy", exact)
    small = bench.build.build(tmp_path / "small", kind, 2000, tmp_path / "vectors.npy", None)
    grow = tmp_path / "small" if kind.is_graph else None
    built = bench.build.build(tmp_path / "index", kind, 4000, tmp_path / "vectors.npy", grow)
    assert (small["begin"], built["begin"]) == (0, 2000 if kind.is_graph else 0)
    task = bench.measure.Task(
        str(tmp_path / "index"),
        str(tmp_path / "questions.npy"),
        str(tmp_path / "exact.npy"),
        [kind.efforts[-1]],
        2,
        0.05,
        True,
    )
    result = bench.measure.measure(task)
    (row,) = result["rows"]
    assert row["recall_3"] > (0.999 if name == "Flat" else 0.95)
    assert min(row["single_s"], row["batch_s"], row["p99_ms"], row["all_threads_qps"]) > 0
    assert result["start_s"] >= result["open_s"] > 0
    assert result["held_gib"] > 0


def test_what_is_missing_is_measured_and_the_rest_kept(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.main, "CACHE", tmp_path)
    monkeypatch.setattr(bench.main, "QUESTIONS", 64)
    monkeypatch.setattr(bench.main, "SECONDS", {True: 0.02, False: 0.02})
    monkeypatch.setattr(bench.main, "SHARES", (2, 1))
    graph = find_kind(bench, "HNSW32_SQ8")
    run = bench.main.Bench(4000, [graph])
    run.results["encoder"] = {"fp32": {"batch_s": 0.05}}
    run.run()
    kept = json.loads((tmp_path / "large/4000/results.json").read_text())
    assert sorted(map(int, kept["HNSW32_SQ8"])) == [2000, 4000]
    builds = [kept["HNSW32_SQ8"][str(size)]["build_cpu_s"] for size in (2000, 4000)]
    assert builds == sorted(builds)  # a graph costs what the smaller one cost as well
    assert not [path for path in (tmp_path / "large/4000").iterdir() if path.is_dir()]
    again = bench.main.Bench(4000, [graph])
    again.results["encoder"] = run.results["encoder"]
    monkeypatch.setattr(again, "_call", None)  # nothing is left to run
    again.run()
    assert again.results == kept | {"encoder": run.results["encoder"]}


def test_the_table_of_forage_plan_is_that_of_the_laws(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    file = tmp_path / "speeds.yaml"
    monkeypatch.setattr(bench.table, "FILE", file)
    coefficients = {"base": 1e-4, "step": 4e-7}
    kind = find_kind(bench, "HNSW32_SQ8")
    encoder = {name: {"single_s": 0.05, "batch_s": 0.04} for name in ("fp32", "int8")}
    bench.table.write({"encoder": encoder}, {kind: follow(bench, "HNSW32_SQ8", coefficients)}, 1_000_000)
    table = yaml.safe_load(file.read_text())
    row = table["types"]["HNSW32_SQ8"]
    assert row["batch"] == pytest.approx(coefficients, rel=0.01)
    assert row["single"]["step"] == pytest.approx(1.2e-6, rel=0.01)
    assert table["encoders"]["base"]["fp32"] == {"single": 0.05, "batch": 0.04}
    assert 1030 < row["bytes"] < 1050


def test_the_recipe_is_compared_by_its_own_type_and_effort(bench: SimpleNamespace) -> None:
    """Not by the fastest of all types, which nobody serves."""
    kinds = [find_kind(bench, name) for name in ("Flat", "IVF,SQ8", "HNSW32_SQ8")]
    gives = [({"kind": kind, "effort": effort}, {}) for kind in kinds for effort in (64, 256)]

    def find(kind: str) -> Any:
        found = bench.report.find_used({"type": kind, "efforts": [64, 256]}, gives)
        return found and (found[0]["kind"].name, found[0]["effort"])

    assert [find("IVF,SQ8"), find("HNSW32_SQ8"), find("PQ8")] == [("IVF,SQ8", 64), ("HNSW32_SQ8", 256), None]
    assert find("Flat")[0] == "Flat"


def test_a_small_number_is_refused_with_what_is_expected(repository: Path) -> None:
    command = [sys.executable, str(repository / "lab/benchmarks/retriever/large_bench.py"), "10"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "argument passages is 10: give 40000 or more" in ended.stderr
