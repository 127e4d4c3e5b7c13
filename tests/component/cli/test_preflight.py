"""Ports in use, and a corpus that another process reads."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from forage_cli.local import preflight
from forage_runtime.errors import DataError, UserError
from forage_runtime.files.corpus import read_rows


def test_a_port_in_use_is_named_with_its_setting(free_address: Callable[[], str]) -> None:
    address = free_address()
    sentence = rf"redis\.url: cannot listen on {address} .*in use.*--base-port"
    with (
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
        pytest.raises(UserError, match=sentence),
    ):
        preflight.check_port("redis.url", address)
    preflight.check_port("redis.url", address)


def test_a_corpus_in_parquet_is_read_as_the_retriever_reads_it(tmp_path: Path) -> None:
    rows = [{"id": str(number), "contents": "x"} for number in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    preflight.check_corpus(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"id": 7, "contents": "y"}\n')
    preflight.check_corpus(tmp_path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows, {"id": "3", "contents": ""}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:4: field 'contents' is ''"):
        preflight.check_corpus(tmp_path)


def test_texts_that_parquet_has_as_bytes_are_read(tmp_path: Path) -> None:
    rows = [{"id": b"1", "contents": "Ōsaka\nx".encode()}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "part")
    with closing(read_rows(tmp_path / "part")) as read:
        assert [fields for _, fields, _ in read] == [{"id": "1", "contents": "Ōsaka\nx"}]


@pytest.mark.parametrize(
    "odd", [pyarrow.array([b"\xff"]), pyarrow.array([2**55], pyarrow.timestamp("ms"))], ids=["bytes", "time"]
)
def test_a_value_that_parquet_alone_has_is_one_sentence(tmp_path: Path, odd: pyarrow.Array) -> None:
    columns = pyarrow.table({"id": ["1"], "contents": ["x"], "odd": odd})
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"^\S*a\.parquet cannot be read as Parquet \([^\n]*\): give"):
        preflight.check_corpus(tmp_path / "a.parquet")
