"""Manifests, and the detection of any damage to an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forage_retriever.index import manifest
from forage_retriever.index.build import build_index
from forage_retriever.index.manifest import DamagedError
from forage_retriever.index.recipe import Recipe
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrievalMode, RetrieverSettings


@pytest.fixture
def folder(corpus_file: Path, tmp_path: Path) -> Path:
    recipe = Recipe.from_settings(RetrieverSettings(mode=RetrievalMode.BM25, filter_fields=("lang",)), None)
    build_index(tmp_path / "index", tmp_path / "staging", corpus_file, recipe, lambda *_: None)
    return tmp_path / "index"


def test_a_manifest_describes_the_index(folder: Path) -> None:
    kept = manifest.read_manifest(folder)
    assert (kept.passages, kept.filter_fields, kept.modes) == (6, ("lang",), (RetrievalMode.BM25,))
    assert kept.dense is kept.encoder is kept.shard is None
    assert kept.made_with["tantivy"]
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name in held if not name.endswith(".lock")} == {*kept.files, "manifest.json"}
    assert manifest.check_files(folder, kept) == []


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, r"{name} has \d+ bytes, not \d+"),
        (flip, r"{name} has the digest [0-9a-f]{{64}}, not {digest}"),
        (Path.unlink, r"{name} is missing"),
    ],
)
def test_any_damaged_file_is_named(folder: Path, damage: Callable[[Path], None], sentence: str) -> None:
    kept = manifest.read_manifest(folder)
    for name, entry in kept.files.items():
        if entry.bytes:
            whole = (folder / name).read_bytes()
            damage(folder / name)
            with pytest.raises(DamagedError, match=sentence.format(name=name, digest=entry.sha256)):
                manifest.check_files(folder, kept)
            (folder / name).write_bytes(whole)


def test_beyond_the_byte_limit_only_sizes_are_checked(folder: Path) -> None:
    kept = manifest.read_manifest(folder)
    largest = max(kept.files, key=lambda name: kept.files[name].bytes)
    flip(folder / largest)
    assert manifest.check_files(folder, kept, limit=manifest.sum_bytes(kept.files) - 1) == [largest]
    truncate(folder / largest)
    with pytest.raises(DamagedError, match=f"{largest} has"):
        manifest.check_files(folder, kept, limit=0)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_changed_bit_of_a_manifest_is_detected(folder: Path, place: float, bit: int) -> None:
    whole = (folder / "manifest.json").read_bytes()
    content = bytearray(whole)
    content[int(place * len(content))] ^= 1 << bit
    before = manifest.read_manifest(folder)
    (folder / "manifest.json").write_bytes(content)
    try:
        after, problem = manifest.read_manifest(folder), ""
    except UserError as error:
        after, problem = before, str(error)
    (folder / "manifest.json").write_bytes(whole)
    assert after == before  # a flip in the white space changes nothing
    assert not problem or str(folder) in problem


@pytest.mark.parametrize(
    ("format", "sentence"), [(manifest.FORMAT + 1, "is of format 2, not 1: build it again"), (None, "is damaged")]
)
def test_a_manifest_of_other_code_is_refused(folder: Path, format: int | None, sentence: str) -> None:
    file = folder / "manifest.json"
    kept = json.loads(file.read_text())
    kept["manifest"] |= {"format": format, "unheard_of": 1}
    file.write_text(json.dumps(kept))
    with pytest.raises(UserError, match=sentence):
        manifest.read_manifest(folder)


def test_a_folder_without_a_manifest_is_refused_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} is not an index .*forage index build"):
        manifest.read_manifest(tmp_path)
    for number in (0, 1, 10):
        shutil.copytree(folder, tmp_path / f"shard-{number}")
    assert [path.name for path in manifest.list_shards(tmp_path)] == ["shard-0", "shard-1", "shard-10"]
    with pytest.raises(UserError, match=f"holds 3 shards, name one: {tmp_path}/shard-0"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize("opening", [b"[", b'{"manifest":'])
def test_a_manifest_nested_thousands_deep_is_damaged(folder: Path, opening: bytes) -> None:
    (folder / "manifest.json").write_bytes(opening * 200_000)
    with pytest.raises(DamagedError, match=r"manifest.json is damaged \(the file: .*build this index again"):
        manifest.read_manifest(folder)
