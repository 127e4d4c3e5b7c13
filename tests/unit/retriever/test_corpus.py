"""Reading valid and malformed corpora, the corpus store, and its filters."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from retriever_parts import write_corpus

from forage_retriever.corpus import columns, read, store
from forage_retriever.corpus.columns import UnknownFieldError
from forage_retriever.corpus.read import Passage
from forage_retriever.corpus.store import Corpus, DuplicateIdError
from forage_runtime.errors import DataError
from forage_runtime.files import corpus, parquet_rows
from forage_runtime.files.parquet_rows import PARQUET_READER

GOOD = '{"id": "a", "contents": "\\"T\\"\\ntext"}'


def build_passage(id: str, **fields: object) -> Passage:
    return Passage.from_row(json.dumps({"id": id, "contents": f"title {id}", **fields}).encode())


def test_a_corpus_keeps_every_field_and_the_order(corpus_file: Path, texts: Corpus) -> None:
    rows = [json.loads(line) for line in corpus_file.read_text().splitlines()]
    assert list(texts.ids) == ["n", "o", "k", "7", "t", "s"]
    assert [json.loads(row) for row in texts.rows] == rows
    assert texts.contents[1:3] == [row["contents"] for row in rows[1:3]]
    assert (texts[3].id, texts[-1].fields) == ("7", rows[-1])
    assert b"\n" not in texts.rows[1]
    assert texts.digest == hashlib.sha256(b"".join(row + b"\n" for row in texts.rows)).hexdigest()
    with pytest.raises(IndexError):
        texts.ids[6]


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\n\n  \r\n")
    assert [passage.id for passage in read.read_passages(file)] == ["a"]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (GOOD + "\n{", "c.jsonl:2 is not JSON"),
        ("[1]", "c.jsonl:1 is a JSON list"),
        ("null", "c.jsonl:1 is a JSON NoneType"),
        ('{"contents": "x"}', "c.jsonl:1: field 'id' is missing"),
        ('{"id": null, "contents": "x"}', "field 'id' is missing or null"),
        ('{"id": "", "contents": "x"}', "field 'id' is ''"),
        ('{"id": true, "contents": "x"}', "field 'id' is True"),
        ('{"id": 1.5, "contents": "x"}', "field 'id' is 1.5"),
        ('{"id": "a"}', "c.jsonl:1: field 'contents' is missing"),
        ('{"id": "a", "contents": " \\n"}', "field 'contents' is ' \\n'"),
        ('{"id": "a", "contents": ["x"]}', "field 'contents' is ['x']"),
        ('{"id": "a", "contents": "x", "n": NaN}', "NaN is not a JSON number"),
        ('{"id": "a", "contents": "\\ud800"}', "c.jsonl:1 is not JSON"),
        ("[" * 100_000, "c.jsonl:1 is not JSON"),
    ],
)
def test_a_malformed_corpus_is_one_sentence_with_file_line_and_field(tmp_path: Path, lines: str, sentence: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(lines)
    with pytest.raises(DataError) as error:
        list(read.read_passages(file))
    assert sentence in str(error.value)
    assert str(file) in str(error.value)


def test_a_corpus_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_bytes(GOOD.encode() + b'\n{"id": "b", "contents": "\xff"}')
    with pytest.raises(DataError, match=r"c.jsonl:2 is not UTF-8"):
        list(read.read_passages(file))


def test_an_overlong_line_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 100)
    file = tmp_path / "c.jsonl"
    file.write_text("[" + "1, " * 100)
    with pytest.raises(DataError, match="line of more than 100 bytes"):
        list(read.read_passages(file))


@pytest.mark.parametrize("name", ["absent.jsonl", "damaged.jsonl.gz", "cut.jsonl.gz", ""])
def test_a_corpus_that_cannot_be_read_names_file_and_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "damaged.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 1000)[:-20])
    folder = tmp_path if name else tmp_path / "empty"
    folder.mkdir(exist_ok=True)
    with pytest.raises(DataError, match=f"{folder / name} cannot be read"):
        list(read.read_passages(folder / name))


def test_parquet_without_its_reader_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARQUET_READER, raising=False)
    monkeypatch.setattr(parquet_rows.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="needs pyarrow"):
        list(read.read_passages(tmp_path / "c.parquet"))


@pytest.mark.parametrize(
    ("contents", "want"),
    [
        ('"Oslo"\nA city.', ("Oslo", "A city.")),
        ("Oslo", ("Oslo", "")),
        ("\ntext", ("", "text")),
    ],
)
def test_the_first_line_is_the_title(contents: str, want: tuple[str, str]) -> None:
    assert read.split_contents(contents) == want


@given(st.binary(max_size=200))
def test_any_bytes_are_passages_or_a_data_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("any") / "c.jsonl"
    file.write_bytes(content)
    try:
        passages, problem = list(read.read_passages(file)), str(file)
    except DataError as error:
        passages, problem = [], str(error)
    assert [Passage.from_row(one.row) for one in passages] == passages
    assert str(file) in problem


@pytest.mark.parametrize("sorted_at_once", [2, 2**22])
def test_duplicate_ids_are_found_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sorted_at_once: int) -> None:
    monkeypatch.setattr(store, "_SORTED", sorted_at_once)
    ids = [str(n) for n in range(100)]
    (tmp_path / "good").mkdir()
    assert len(write_corpus(tmp_path / "good", map(build_passage, ids))) == 100
    (tmp_path / "bad").mkdir()
    with pytest.raises(DuplicateIdError, match="'17'"):
        write_corpus(tmp_path / "bad", map(build_passage, [*ids, "17"]))


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A corpus of millions in small: what is buffered and sorted at a time is as much smaller as the corpus.
    for module, name in ((store, "_FLUSHED"), (store, "_SORTED"), (columns, "_FLUSHED"), (columns, "_BLOCK")):
        monkeypatch.setattr(module, name, 512)

    def generate_passages(count: int) -> Iterator[Passage]:
        return (build_passage(f"passage-{n}", lang=("en", "de")[n % 2]) for n in range(count))

    def measure_peak(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        tracemalloc.start()
        write_corpus(folder, generate_passages(count), ["lang"])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    small, large = measure_peak(1_000), measure_peak(8_000)
    assert (tmp_path / "8000/rows.bin").stat().st_size > 400_000
    assert large - small < 7_000 * 8


@pytest.mark.parametrize("file", ["corpus.json", "rows.bin", "offsets.bin", "columns/0/values.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_corpus_is_one_sentence(texts: Corpus, tmp_path: Path, file: str, damage: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tmp_path / "corpus", folder)
    target = folder / file
    content = target.read_bytes()
    target.unlink()
    if damage == "cut":
        target.write_bytes(content[:-8])
    with pytest.raises(DataError, match=f"corpus {folder} cannot be read.*build it again"):
        Corpus(folder)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no passages"):
        write_corpus(tmp_path, [])


@pytest.mark.parametrize(
    ("filters", "want"),
    [
        ((), ["n", "o", "k", "7", "t", "s"]),
        ((("lang", ("nb",)),), ["o"]),
        ((("lang", ("fr", "nn")),), ["o", "7"]),
        ((("lang", ("xx",)),), []),
        ((("lang", ()),), []),
        ((("lang", ("nn",)), ("lang", ("nb",))), ["o"]),
    ],
)
def test_a_filter_passes_passages_with_an_accepted_value(
    texts: Corpus, filters: columns.Filters, want: list[str]
) -> None:
    mask = texts.columns.compute_mask(filters)
    assert [texts.ids[row] for row in np.flatnonzero(mask)] == want
    assert texts.columns.compute_mask(filters) is mask
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True


def test_a_filter_on_an_unknown_field_names_the_known_ones(texts: Corpus) -> None:
    with pytest.raises(UnknownFieldError, match="'year' is unknown: those of this index are lang"):
        texts.columns.compute_mask((("year", ("1",)),))


def test_values_of_every_type_become_text(tmp_path: Path) -> None:
    rows = [
        build_passage(str(n), f=value)
        for n, value in enumerate([1, True, "1", None, 1.5, ["1", 2, "1", None], [], "a=b"])
    ]
    corpora = write_corpus(tmp_path, rows, ["f", "g"])
    assert [corpora.columns.list_filter_terms(row.fields) for row in rows] == [
        ["f=1"], ["f=true"], ["f=1"], [], ["f=1.5"], ["f=1", "f=2"], [], ["f=a=b"],
    ]  # fmt: skip
    assert np.flatnonzero(corpora.columns.compute_mask((("f", ("1",)),))).tolist() == [0, 2, 5]
    assert not corpora.columns.compute_mask((("g", ("1",)),)).any()


@pytest.mark.parametrize("value", [{"a": 1}, [["a"]], [{}]])
def test_a_value_that_cannot_be_filtered_by_names_passage_and_field(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match=r"passage 'x': field 'f' is .*: give a text, a number, or a list of these"):
        write_corpus(tmp_path, [build_passage("x", f=value)], ["f"])


def test_a_field_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_VALUES", 10)
    with pytest.raises(DataError, match="field 'id' has more than 10 values"):
        write_corpus(tmp_path, (build_passage(str(n)) for n in range(11)), ["id"])


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), unique=True, max_size=3), min_size=1, max_size=60),
    st.sampled_from([1, 7, 64]),
)
def test_sorting_values_in_blocks_keeps_every_row(
    tmp_path_factory: pytest.TempPathFactory, lists: list[list[str]], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_BLOCK", block)
        corpora = write_corpus(
            tmp_path_factory.mktemp("c"), (build_passage(str(n), f=one) for n, one in enumerate(lists)), ["f"]
        )
    for value in "abcdef":
        assert corpora.columns.compute_mask((("f", (value,)),)).tolist() == [value in one for one in lists]
