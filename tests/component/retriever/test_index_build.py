"""Indexes are built, loaded, converted, adopted and sharded; mismatches are refused with a sentence."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from forage_retriever.encoders.encoder import Encoder, Vectors
from forage_retriever.index import load, manifest, space
from forage_retriever.index.build import build_index
from forage_retriever.index.cache import build_cached
from forage_retriever.index.convert import convert_index
from forage_retriever.index.manifest import DamagedError
from forage_retriever.index.progress import open_report
from forage_retriever.index.recipe import Recipe
from forage_retriever.index.workspace import Workspace
from forage_retriever.search import faiss_build
from forage_runtime.errors import DataError, SettingsError, UserError
from forage_runtime.settings import RetrievalMode, RetrieverSettings

PLACES = ["Oslo", "Kandy", "Cotonou", "Bergen", "Colombo", "Parakou", "Graz", "Turin", "Quito", "Perth"]
KINDS = ["is a city", "has a port", "was founded long ago", "is known for its food"]


class Recorder:
    """The real encoder, which records the passages that it encodes."""

    def __init__(self, inner: Encoder, **other: str) -> None:
        self._inner = inner
        self._other = other
        self.encoded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return self._other.get(name) or getattr(self._inner, name)

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        self.encoded += texts
        return self._inner.encode_passages(texts, progress)


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    rows = [
        {"id": f"{place}-{n}", "contents": f'"{place}"\n{place} {kind}.', "kind": n}
        for place in PLACES
        for n, kind in enumerate(KINDS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def settings(tmp_path: Path) -> RetrieverSettings:
    return RetrieverSettings(cache_dir=tmp_path / "cache")


@pytest.fixture
def loading(encoder: Encoder, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., load.Index]:
    """Loads an index with the session's encoder in place of loading it again."""

    def begin(settings: RetrieverSettings, other: Encoder | Recorder | None = None) -> load.Index:
        dense = settings.mode is not RetrievalMode.BM25
        monkeypatch.setattr(load.recipe, "load_encoder", lambda *_, **__: (other or encoder) if dense else None)
        return load.load_index(corpus_file, settings, lambda what: None)

    return begin


@pytest.fixture
def built(encoder: Encoder, corpus_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """Builds an index folder: `built("name", faiss_factory="HNSW8", vectors="float16")`."""

    def begin(name: str, vectors: manifest.Vectors | None = None, shards: int = 1, **changed: Any) -> Path:
        recipe = Recipe.from_settings(RetrieverSettings(**changed), encoder, vectors)
        if recipe.mode is RetrievalMode.BM25:
            recipe = replace(recipe, encoder=None)
        build_index(tmp_path / name, tmp_path / f".{name}", corpus_file, recipe, lambda *_: None, shards)
        return tmp_path / name

    return begin


def search_ids(index: load.Index, query: str, mode: str | None = None, topk: int = 5) -> list[str]:
    searcher = index.searchers[mode] if mode else index.searcher
    return [index.corpus.ids[hit.row] for hit in searcher.search([query], topk)[0]]


def test_an_index_is_built_once_and_searched_in_every_mode(
    loading: Callable[..., load.Index], settings: RetrieverSettings
) -> None:
    first = loading(settings)
    folder = next(settings.cache_dir.glob("hybrid-*"))
    build_time = (folder / "manifest.json").stat().st_mtime_ns
    second = loading(settings)
    assert (folder / "manifest.json").stat().st_mtime_ns == build_time
    assert [path.name for path in settings.cache_dir.iterdir()] == [folder.name]
    assert first.provenance == second.provenance
    assert set(second.searchers) == {"title", "bm25", "dense", "hybrid"}
    for mode in second.searchers:
        assert all(id.startswith("Quito-") for id in search_ids(second, "Quito", mode, topk=4))
    kept = manifest.read_manifest(folder)
    assert second.provenance.index == kept.compute_digest(RetrievalMode.HYBRID)
    assert len({kept.compute_digest(mode) for mode in RetrievalMode}) == 3


def test_a_damaged_index_of_the_cache_is_built_again(
    loading: Callable[..., load.Index], settings: RetrieverSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    first = loading(settings)
    folder = next(settings.cache_dir.glob("hybrid-*"))
    file = folder / "dense/index.faiss"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = loading(settings)
    assert again.provenance == first.provenance
    assert search_ids(again, "Quito", "dense") == search_ids(first, "Quito", "dense")
    manifest.check_files(folder, manifest.read_manifest(folder))
    assert [path.name for path in settings.cache_dir.iterdir()] == [folder.name], "what was damaged is gone"
    assert "damaged_index_built_again" in capsys.readouterr().err


def test_a_damaged_index_folder_of_the_settings_is_refused_and_kept(
    loading: Callable[..., load.Index], built: Callable[..., Path], settings: RetrieverSettings
) -> None:
    folder = built("both")
    with (folder / "bm25" / "meta.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match=r"is damaged: bm25/meta\.json"):
        loading(settings.model_copy(update={"index": folder}))
    assert (folder / "dense/index.faiss").exists()


def test_an_index_folder_is_served_in_its_modes(
    loading: Callable[..., load.Index], built: Callable[..., Path], settings: RetrieverSettings
) -> None:
    both, words = built("both"), built("words", mode=RetrievalMode.BM25)
    given = settings.model_copy(update={"index": both, "mode": RetrievalMode.BM25})
    assert set(loading(given).searchers) == {"title", "bm25"}  # and neither encoder nor vectors are loaded
    assert search_ids(loading(settings.model_copy(update={"index": both})), "Graz")[0].startswith("Graz-")
    with pytest.raises(SettingsError, match=r"retriever.mode is hybrid, and index .*words has bm25"):
        loading(settings.model_copy(update={"index": words}))
    assert not settings.cache_dir.exists()


def test_a_symbolic_link_is_resolved_once(
    loading: Callable[..., load.Index], built: Callable[..., Path], settings: RetrieverSettings, tmp_path: Path
) -> None:
    link = tmp_path / "current"
    link.symlink_to(built("one", mode=RetrievalMode.BM25).name)
    given = settings.model_copy(update={"index": link, "mode": RetrievalMode.BM25})
    index = loading(given)
    link.unlink()
    assert search_ids(index, "Perth")[0].startswith("Perth-")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"filter_fields": ("kind", "year")}, "retriever.filter_fields has 'year', .* was built with kind"),
        ({"index": Path("absent")}, "absent is not an index"),
    ],
)
def test_settings_that_disagree_with_an_index_are_refused(
    loading: Callable[..., load.Index],
    built: Callable[..., Path],
    settings: RetrieverSettings,
    changed: dict[str, Any],
    sentence: str,
) -> None:
    folder = built("words", mode=RetrievalMode.BM25, filter_fields=("kind",))
    given = settings.model_copy(update={"index": folder, "mode": RetrievalMode.BM25} | changed)
    with pytest.raises(UserError, match=sentence):
        loading(given)


def test_an_encoder_must_be_of_the_family_of_the_index(
    loading: Callable[..., load.Index], built: Callable[..., Path], settings: RetrieverSettings, encoder: Encoder
) -> None:
    given = settings.model_copy(update={"index": built("both")})
    with pytest.raises(SettingsError, match=r"retriever.encoder is other .* was built with minilm"):
        loading(given, Recorder(encoder, family="another", model="other"))
    rounded = loading(given, Recorder(encoder, digest="rounded"))
    assert rounded.provenance.encoder == "rounded"


@pytest.mark.parametrize("part", ["corpus/rows.bin", "dense/index.faiss"])
def test_a_corrupt_file_is_refused_with_both_digests(
    loading: Callable[..., load.Index], built: Callable[..., Path], settings: RetrieverSettings, part: str
) -> None:
    folder = built("both")
    content = bytearray((folder / part).read_bytes())
    content[-5] ^= 1
    (folder / part).write_bytes(content)
    with pytest.raises(DamagedError, match=f"{part} has the digest"):
        loading(settings.model_copy(update={"index": folder}))


def test_an_index_of_older_code_is_refused(
    loading: Callable[..., load.Index],
    built: Callable[..., Path],
    settings: RetrieverSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = built("both")
    monkeypatch.setattr(faiss_build, "RECIPE", "dense/99")
    with pytest.raises(UserError, match=r"built by other code \(dense/\d, not dense/99\): build it again"):
        loading(settings.model_copy(update={"index": folder}))


def test_memory_is_checked_before_loading_and_building(
    loading: Callable[..., load.Index],
    built: Callable[..., Path],
    settings: RetrieverSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = built("compressed", faiss_factory="PQ96x4fs", mode=RetrievalMode.DENSE)
    given = settings.model_copy(update={"index": folder, "mode": RetrievalMode.DENSE})
    monkeypatch.setattr(space, "measure_available_memory", lambda: 10_000)
    monkeypatch.setattr(faiss, "read_index", lambda *_: pytest.fail("loaded before the check"))
    with pytest.raises(UserError, match=r"PQ96x4fs index over 40 passages .* needs .* of which 0 MiB are free"):
        loading(given)
    with pytest.raises(UserError, match=r"building HNSW32 over 40 passages takes 72.3 kB .* 10.0 kB are free"):
        built("graph", faiss_factory="HNSW32")
    monkeypatch.setattr(space, "measure_available_memory", lambda: 8 * 10**9)
    with pytest.raises(UserError, match=r"takes 70.2 GB .* 8.0 GB are free: use retriever.faiss_factory=IVF\d+,\w+, w"):
        space.check_build_memory("HNSW32", 768, 21_000_000)
    space.check_build_memory("Flat", 768, 21_000_000)  # which is written piece by piece


def test_disk_space_is_checked_before_building(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=20_000))
    with pytest.raises(UserError, match=f"an index of 40 passages need .* on the disk of {tmp_path}, of which"):
        built("flat")


def test_a_bad_corpus_leaves_no_files(
    loading: Callable[..., load.Index], settings: RetrieverSettings, corpus_file: Path
) -> None:
    with corpus_file.open("a") as file:
        file.write('\n{"id": "Graz-1", "contents": "again"}\n')
    with pytest.raises(DataError, match=r"corpus.jsonl:42: id 'Graz-1' is already that of .*corpus.jsonl:26: make ids"):
        loading(settings)
    assert not settings.cache_dir.exists()


def test_concurrent_builds_encode_once_and_all_succeed(
    encoder: Encoder, corpus_file: Path, settings: RetrieverSettings
) -> None:
    recorder = Recorder(encoder)
    folders: list[Path] = []

    def begin() -> None:
        folders.append(build_cached(corpus_file, settings, recorder, lambda *_: None))  # type: ignore[arg-type]

    threads = [threading.Thread(target=begin) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert len(recorder.encoded) == 40


def test_vectors_are_reused_after_a_factory_string_that_does_not_fit(
    built: Callable[..., Path], encoder: Encoder, corpus_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="'IVF256,Flat' does not fit"):
        built("index", faiss_factory="IVF256,Flat")
    recorder = Recorder(encoder)
    recipe = replace(Recipe.from_settings(RetrieverSettings(), encoder), encoder=recorder)  # type: ignore[arg-type]
    build_index(tmp_path / "index", tmp_path / ".index", corpus_file, recipe, lambda *_: None)
    assert recorder.encoded == []
    assert manifest.read_manifest(tmp_path / "index").dense.factory == "Flat"  # type: ignore[union-attr]
    assert not (tmp_path / ".index").exists()


@pytest.mark.parametrize(("old", "kept"), [("Flat", None), ("HNSW8", None), ("IVF4,SQ8", "float16")])
def test_an_index_is_converted_without_encoding_again(
    built: Callable[..., Path], encoder: Encoder, tmp_path: Path, old: str, kept: manifest.Vectors | None
) -> None:
    folder = built("old", faiss_factory=old, vectors=kept)
    recipe = Recipe.from_settings(RetrieverSettings(faiss_factory="Flat"), None, "float32")
    convert_index(folder, tmp_path / "new", tmp_path / ".new", recipe, lambda *_: None)
    new, before = manifest.read_manifest(tmp_path / "new"), manifest.read_manifest(folder)
    assert manifest.check_files(tmp_path / "new", new) == []
    assert (new.dense.factory, new.dense.vectors) == ("Flat", "float32")  # type: ignore[union-attr]
    assert (new.corpus_digest, new.encoder, new.bm25) == (before.corpus_digest, before.encoder, before.bm25)
    index = faiss.read_index(str(tmp_path / "new/dense/index.faiss"))
    texts = [json.loads(line)["contents"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    wanted = encoder.encode_passages(texts, lambda done: None)
    stored = index.reconstruct_n(0, 40)
    assert np.abs(stored - wanted).max() <= (0 if kept is None else 1e-3)
    assert np.array_equal(np.load(tmp_path / "new/dense/vectors.npy"), stored)


def test_indexes_without_vectors_cannot_be_converted(built: Callable[..., Path], tmp_path: Path) -> None:
    recipe = Recipe.from_settings(RetrieverSettings(), None)
    with pytest.raises(UserError, match="words has no dense part"):
        convert_index(built("words", mode=RetrievalMode.BM25), tmp_path / "n", tmp_path / ".n", recipe, lambda *_: None)
    with pytest.raises(UserError, match=r"small keeps no vectors and IVF4,SQ8 does not give them back"):
        convert_index(
            built("small", faiss_factory="IVF4,SQ8", vectors=""),
            tmp_path / "n",
            tmp_path / ".n",
            recipe,
            lambda *_: None,
        )


def test_shards_are_complete_indexes_of_consecutive_passages(
    built: Callable[..., Path], loading: Callable[..., load.Index], settings: RetrieverSettings, corpus_file: Path
) -> None:
    folders = manifest.list_shards(built("cut", shards=3, filter_fields=("kind",)))
    parts = [loading(settings.model_copy(update={"index": folder})) for folder in folders]
    wanted = [json.loads(line)["id"] for line in corpus_file.read_text().splitlines()]
    assert [id for part in parts for id in part.corpus.ids] == wanted
    shards = [manifest.read_manifest(folder).shard for folder in folders]
    assert [(shard.number, shard.of, shard.first) for shard in shards if shard] == [(0, 3, 0), (1, 3, 13), (2, 3, 26)]
    whole = loading(settings)
    for query in ("a port in Norway", "Quito was founded long ago"):
        merged = sorted(
            (
                (hit.score, part.corpus.ids[hit.row])
                for part in parts
                for hit in part.searchers["dense"].search([query], 5)[0]
            ),
            reverse=True,
        )
        assert [id for _, id in merged[:5]] == search_ids(whole, query, "dense")
    with pytest.raises(UserError, match="--shards 41 is more than the 40 passages"):
        built("dust", shards=41)


def test_a_kill_after_the_rename_leaves_a_complete_index(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workspace, "discard", lambda self: None)  # killed after the index was put into its place
    folder = built("index", mode=RetrievalMode.BM25)
    assert (tmp_path / ".index").exists()
    monkeypatch.undo()
    assert built("index", mode=RetrievalMode.BM25) == folder
    assert not (tmp_path / ".index").exists()
    assert manifest.check_files(folder, manifest.read_manifest(folder)) == []


def test_an_interrupted_build_says_that_its_work_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), open_report():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "stopped: the same command resumes from here\n"


def test_a_lucene_index_is_refused_with_the_command_that_builds_one(
    loading: Callable[..., load.Index], settings: RetrieverSettings, built: Callable[..., Path], tmp_path: Path
) -> None:
    lucene = tmp_path / "save/bm25"
    lucene.mkdir(parents=True)
    for name in ("segments_1", "_0.cfs", "_0.si"):
        (lucene / name).touch()
    remedy = f"forage index build {lucene}-forage --mode bm25 --corpus"
    for index in (lucene, lucene.parent):
        with pytest.raises(UserError, match=remedy):
            loading(settings.model_copy(update={"index": index}))
    with pytest.raises(UserError, match=remedy):
        manifest.read_manifest(lucene)
    recipe = Recipe.from_settings(settings, None)
    with pytest.raises(UserError, match=remedy):
        convert_index(lucene, tmp_path / "new", tmp_path / ".new", recipe, lambda *_: None)
