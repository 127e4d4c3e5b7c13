"""Ports in use, and a corpus that another process reads."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from forage_cli.local import preflight
from forage_common.errors import DataError, UserError


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
