"""The table and the index of a run follow its files: new, replaced, deleted, damaged and old ones, here and remote."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import WAIT_S
from step_runs import END, build_step_row, write_steps
from upath import UPath

from forage_console.errors import NotFoundError
from forage_console.models.trajectories import TrajectoryPage, TrajectoryQuery
from forage_console.store import run_store
from forage_console.store.files import list_files
from forage_console.store.queries import list_rows
from forage_console.store.run_store import RunStore
from forage_console.store.stores import Stores
from forage_console.store.texts import Phrase, TextIndex, cut_snippet, make_pattern, parse_phrases, scan
from forage_records.step_file import StepRow, step_file_path, write_step
from forage_records.trajectory_rows import read_step_rows


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are listed at every request."""
    monkeypatch.setattr(run_store, "LIST_S", 0.0)
    monkeypatch.setattr(run_store, "WAIT_S", WAIT_S)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    write_steps(folder, [build_step_row(1, text="red apple"), build_step_row(2, text="green pear")])
    return folder


@contextmanager
def open_store(run: Path | UPath, cache: Path) -> Iterator[RunStore]:
    stores = Stores(cache)
    try:
        yield stores.open(UPath(run))
    finally:
        stores.close()


def ask(store: RunStore, **query: object) -> TrajectoryPage:
    store.refresh()
    return list_rows(store, TrajectoryQuery.model_validate(query))


def list_places(store: RunStore, **query: object) -> list[str]:
    return [row.place for row in ask(store, **query).rows]


def wait_for_index(store: RunStore) -> None:
    while ask(store).indexed < 1:
        store._threads["texts"].join(WAIT_S)


def test_new_replaced_and_deleted_files_are_noticed(run: Path, tmp_path: Path) -> None:
    with open_store(run, tmp_path / "cache") as store:
        assert list_places(store, text="pear") == ["step-2"]
        write_steps(run, [build_step_row(3, text="pear and apple")])
        wait_for_index(store)
        assert list_places(store, text="pear") == ["step-3", "step-2"]
        write_steps(
            run, [build_step_row(2, text="blue plum"), build_step_row(2, sample=1, text="plum")]
        )  # after a rollback
        assert list_places(store, text="pear") == ["step-3"]
        assert list_places(store, text="plum") == ["step-2", "step-2"]
        step_file_path(run, 3).unlink()
        wait_for_index(store)
        assert list_places(store) == ["step-2", "step-2", "step-1"]
        assert list_places(store, text="pear") == []
        assert ask(store).all == 3


def test_table_and_index_are_kept_for_the_next_process(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(run, tmp_path / "cache") as store:
        wait_for_index(store)
    step_file_path(run, 2).unlink()

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(run_store, "read_values", refuse)
    monkeypatch.setattr(run_store, "scan", refuse)
    with open_store(run, tmp_path / "cache") as store:
        assert list_places(store, text="apple") == ["step-1"]
        assert list_places(store) == ["step-1"]
    assert not [name for name in os.listdir(run) if name not in ("trajectories",)], "nothing is written to the run"


def test_what_nobody_has_looked_at_for_long_is_deleted(run: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / ("ab" * 12)).mkdir(parents=True)
    (tmp_path / "cache" / "other").mkdir()
    for folder in (tmp_path / "cache").iterdir():
        os.utime(folder, (0, 0))
    with open_store(run, tmp_path / "cache"):
        assert "other" in os.listdir(tmp_path / "cache")
        assert "ab" * 12 not in os.listdir(tmp_path / "cache")


def test_two_processes_may_share_a_cache(run: Path, tmp_path: Path) -> None:
    with open_store(run, tmp_path / "cache") as one, open_store(run, tmp_path / "cache") as other:
        wait_for_index(one)
        wait_for_index(other)
        assert list_places(one, text="apple") == list_places(other, text="apple") == ["step-1"]
        assert len(list(one.texts.find([Phrase(("apple",))]))) == 1, "a text is in the index once"


@pytest.mark.parametrize("name", ["values.duckdb", "texts.sqlite"])
def test_a_damaged_cache_is_made_anew(run: Path, tmp_path: Path, name: str) -> None:
    with open_store(run, tmp_path / "cache") as store:
        wait_for_index(store)
    (file,) = (tmp_path / "cache").rglob(name)
    file.write_bytes(b"damaged" * 1000)
    with open_store(run, tmp_path / "cache") as store:
        wait_for_index(store)
        assert list_places(store, text="apple") == ["step-1"]


def test_a_cache_that_is_deleted_meanwhile_is_made_anew(run: Path, tmp_path: Path) -> None:
    with open_store(run, tmp_path / "cache") as store:
        wait_for_index(store)
        shutil.rmtree(tmp_path / "cache")
        assert list_places(store, text="apple") == ["step-1"]
        wait_for_index(store)
        assert list_places(store, text="pear") == ["step-2"]
        assert len(store.texts.find([Phrase(("pear",))])) == 1


def test_a_step_beyond_all_numbers_is_left_out(run: Path, tmp_path: Path) -> None:
    shutil.copy(step_file_path(run, 1), run / "trajectories" / f"step-{10**20}.parquet")
    with open_store(run, tmp_path / "cache") as store:
        assert (list_places(store), ask(store).loaded) == (["step-2", "step-1"], 1.0)


def test_a_cache_that_cannot_be_written_is_done_without(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with open_store(run, tmp_path / "file") as store:
        assert list_places(store, text="apple") == ["step-1"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:200] + b"\0" * 300 + content[500:],
        lambda content: b"PAR1 nothing PAR1",
    ],
)
def test_damaged_files_are_left_out(run: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = step_file_path(run, 2)
    file.write_bytes(damage(file.read_bytes()))
    (run / "trajectories" / "step-000003.parquet.partial-1").write_bytes(b"half")
    with open_store(run, tmp_path / "cache") as store:
        page = ask(store, sort="reward")
        assert "step-1" in [row.place for row in page.rows]
        assert list_places(store, text="apple") == ["step-1"]
        write_steps(run, [build_step_row(2, text="whole again")])
        assert list_places(store, text="whole") == ["step-2"]


def test_lines_of_a_validation_that_are_half_written_or_no_objects_are_left_out(run: Path, tmp_path: Path) -> None:
    row = {"uid": "nq/test/1/0", "question": "Who?", "targets": ["x"], "em": 1.0, "reward": 1.0, "spans": []}
    (run / "validation").mkdir()
    lines = [json.dumps(row), "7", json.dumps(row | {"uid": 5, "targets": None, "spans": None}), json.dumps(row)[:30]]
    (run / "validation" / "before.jsonl").write_text("\n".join(lines))
    (run / "validation" / "foreign.jsonl").write_bytes(b"\xff\xfe\n")
    (run / "validation" / "deep.jsonl").write_text('{"a":' + "[" * 100_000 + "\n")
    with open_store(run, tmp_path / "cache") as store:
        assert list_places(store, place="before") == ["before", "before"]
        assert list_places(store, place="before", text="who") == ["before", "before"]
        assert list_places(store, place="foreign") == list_places(store, place="deep") == []
        assert ask(store).loaded == 1.0


def test_a_file_of_an_older_version_is_named_with_what_reads_it(tmp_path: Path) -> None:
    run = tmp_path / "one"
    write_steps(run, [build_step_row(1)])
    file = step_file_path(run, 1)
    newer = ["question", "reason", "em", "response_tokens", "policy_version_min", "entropies"]
    table = pq.read_table(file)
    pq.write_table(table.drop_columns([*newer, "advantage_mean", "search_advantage", "mismatch_max"]), file)
    with open_store(run, tmp_path / "cache") as store:
        assert ask(store).rows == []
        with pytest.raises(NotFoundError, match=r"older version .* 'forage trajectories --step' reads"):
            store.require("step-1")
    (row,) = read_step_rows(file)
    assert (row["question"], row["reward"], row["em"]) == ("Who is it?", 1.0, 1.0)


def test_runs_may_be_at_an_address(run: Path, tmp_path: Path) -> None:
    remote = UPath("memory://bucket/one")
    (remote / "trajectories").mkdir(parents=True)
    for file in (run / "trajectories").iterdir():
        (remote / "trajectories" / file.name).write_bytes(file.read_bytes())
    with open_store(remote, tmp_path / "cache") as store:
        wait_for_index(store)
        assert list_places(store, text="apple") == ["step-1"]
        (remote / "trajectories" / "step-000001.parquet").unlink()
        assert list_places(store) == ["step-2"]


def test_a_run_without_trajectories_is_empty(tmp_path: Path) -> None:
    with open_store(tmp_path / "nothing", tmp_path / "cache") as store:
        page = ask(store, text="apple")
        assert (page.rows, page.total, page.all, page.indexed, page.loaded) == ([], 0, 0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("", []),
        ("  ... !", []),
        ("Two words", [Phrase(("two",)), Phrase(("words",))]),
        ('a "New York" b', [Phrase(("a",)), Phrase(("new", "york")), Phrase(("b",))]),
        ('"not closed', [Phrase(("not", "closed"))]),
        ("well-kept it's", [Phrase(("well", "kept")), Phrase(("it", "s"))]),
        ("begin* *", [Phrase(("begin",), True)]),
        ("snake_case Ünï", [Phrase(("snake", "case")), Phrase(("ünï",))]),
    ],
)
def test_what_a_user_types_is_words_phrases_and_beginnings(text: str, phrases: list[Phrase]) -> None:
    assert parse_phrases(text) == phrases


def test_snippets_show_the_match_in_its_surroundings() -> None:
    text = "x " * 100 + "the Quick  brown\nfox" + " y" * 100
    found = cut_snippet(text, parse_phrases("nothing quick"))
    assert found is not None
    assert found.startswith("…")
    assert found.endswith("…")
    assert "the Quick brown fox y" in found
    assert cut_snippet("quicker", parse_phrases("quick")) is None


WORDS = st.sampled_from(["red", "green", "Red", "re", "GREEN_tea", "zürich", "7", "it's", "<a>", "日本"])


TEXTS = st.lists(st.lists(WORDS, max_size=6).map(" ".join), min_size=1, max_size=5)


@hypothesis.settings(max_examples=30)
@given(texts=TEXTS, asked=st.lists(WORDS, max_size=3), form=st.sampled_from(["{}", '"{}"', "{}*"]))
def test_the_index_finds_what_reading_finds(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], asked: list[str], form: str
) -> None:
    run = tmp_path_factory.mktemp("run")
    rows: list[StepRow] = [build_step_row(1, sample=number, text=text) for number, text in enumerate(texts)]
    write_step(step_file_path(run, 1), END, rows)
    (file,) = list_files(UPath(run))
    index = TextIndex(run / "texts.sqlite")
    index.add(file, threading.Event())
    phrases = parse_phrases(form.format(" ".join(asked)))
    if phrases:
        assert sorted(index.find(phrases)) == [file.identify(row) for row in scan(file, phrases)]


def test_an_index_of_another_format_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "texts.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version=99")
    assert TextIndex(file).done == set()


def test_patterns_match_whole_words() -> None:
    pattern = make_pattern(parse_phrases("red tea*"))
    assert pattern.findall("red, redder, red_ tea, teapot, steam") == ["red", "red", "tea", "tea"]


def test_searches_keep_no_file_open(run: Path, tmp_path: Path) -> None:
    with open_store(run, tmp_path / "cache") as store, ThreadPoolExecutor(8) as threads:
        wait_for_index(store)
        list(threads.map(lambda number: store.texts.find([Phrase((f"apple{number}",))]), range(50)))
        kept = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        assert not [name for name in kept if str(tmp_path) in name and "texts.sqlite" in name]


def test_a_folder_that_cannot_be_listed_is_an_error_each_time_it_is_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: UPath) -> list[object]:
        raise PermissionError(f"{folder} may not be read")

    with open_store(run, tmp_path / "cache") as store:
        monkeypatch.setattr(run_store, "LIST_S", 60.0)
        store._listed = float("-inf")
        monkeypatch.setattr(run_store, "list_files", refuse)
        for _ in range(2):
            with pytest.raises(PermissionError):
                store.refresh()
