"""The table of the values of a run's trajectories, in DuckDB: kept in a file, and one row for each trajectory."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from forage_console.store.files import DataFile
from forage_console.store.values import SCHEMA
from forage_runtime.telemetry.logs import get_logger

_FORMAT = 1
_MEMORY = "100MB"
_IN_USE = ("lock", "conflict")
"""In errors about a file that another process, or this one, has open."""
_TYPES = {
    pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN", pa.string(): "VARCHAR",
    pa.list_(pa.string()): "VARCHAR[]",
}  # fmt: skip
_COLUMNS = ", ".join(f'"{field.name}" {_TYPES[field.type]}' for field in SCHEMA)


class Database:
    """One DuckDB for the tables of all runs, which share its memory."""

    def __init__(self) -> None:
        threads = min(4, os.cpu_count() or 1)
        overflow = str(Path(tempfile.gettempdir()) / "forage-console-overflow")  # else it is in the working folder
        options = {"threads": threads, "memory_limit": _MEMORY, "temp_directory": overflow}
        self._connection = duckdb.connect(config=options)
        self._lock = threading.Lock()
        self._count = 0

    def open_table(self, path: Path) -> Table:
        """Open a run's table, or begin it; in memory where it cannot be kept, or another process has it open."""
        with self._lock:
            self._count += 1
            name = f"run_{self._count}"
            for where in (str(path), str(path)):
                try:
                    return self._attach(where, name)
                except duckdb.Error as error:
                    get_logger().warning("table_not_opened", file=where, reason=str(error)[:200])
                    self._connection.execute(f"DETACH DATABASE IF EXISTS {name}")
                    if any(word in str(error) for word in _IN_USE):
                        break
                    _remove(path)
            return self._attach(":memory:", name)

    def close(self) -> None:
        """Write everything to the files and let go of them."""
        self._connection.close()

    def _attach(self, where: str, name: str) -> Table:
        self._connection.execute(f"ATTACH '{where.replace(chr(39), chr(39) * 2)}' AS {name}")
        table = Table(self._connection, name)
        table.create()
        return table


def _remove(path: Path) -> None:
    for file in (path, path.with_name(path.name + ".wal")):
        file.unlink(missing_ok=True)


class Table:
    """The table of a run: `rows`, and `files` with the key of every file that is in it.

    One thread at a time may change it.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        self._connection, self.name = connection, name

    def create(self) -> None:
        """Create what is missing.

        Raises:
            duckdb.Error: there is something else.
        """
        cursor = self._connection.cursor()
        cursor.execute(f"CREATE TABLE IF NOT EXISTS {self.name}.format AS SELECT {_FORMAT} AS number")
        if cursor.execute(f"SELECT number FROM {self.name}.format").fetchall() != [(_FORMAT,)]:
            raise duckdb.Error("another format")
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {self.name}.files (key BIGINT, place VARCHAR, rows BIGINT, problem VARCHAR)"
        )
        cursor.execute(f"CREATE TABLE IF NOT EXISTS {self.name}.rows ({_COLUMNS})")

    def list_keys(self) -> set[int]:
        """List the keys of the files that are in it."""
        return {key for (key,) in self.query("SELECT key FROM {table}.files")}

    def add(self, file: DataFile, values: pa.Table, problem: str | None = None) -> None:
        """Add a file, in place of its other versions."""
        cursor = self._connection.cursor()
        cursor.register("new_rows", values)
        cursor.execute("BEGIN")
        try:
            cursor.execute(f"DELETE FROM {self.name}.rows WHERE place = ?", [file.place])
            cursor.execute(f"DELETE FROM {self.name}.files WHERE place = ?", [file.place])
            cursor.execute(f"INSERT INTO {self.name}.rows SELECT * FROM new_rows")
            entry = [file.key, file.place, values.num_rows, problem]
            cursor.execute(f"INSERT INTO {self.name}.files VALUES (?, ?, ?, ?)", entry)
            cursor.execute("COMMIT")
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        finally:
            cursor.close()

    def keep(self, keys: Iterable[int]) -> set[int]:
        """Remove the files that have other keys; returns theirs."""
        gone = self.list_keys().difference(keys)
        cursor = self._connection.cursor()
        for key in gone:
            cursor.execute("BEGIN")
            places = f"SELECT place FROM {self.name}.files WHERE key = ?"
            cursor.execute(f"DELETE FROM {self.name}.rows WHERE place IN ({places})", [key])
            cursor.execute(f"DELETE FROM {self.name}.files WHERE key = ?", [key])
            cursor.execute("COMMIT")
        cursor.close()
        return gone

    def query(
        self, statement: str, values: Sequence[Any] = (), matches: pa.Table | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a query, in which {table} is this one's name and `matches` a table of its own."""
        cursor = self._connection.cursor()
        try:
            if matches is not None:
                cursor.register("matches", matches)
            found: list[tuple[Any, ...]] = cursor.execute(statement.replace("{table}", self.name), values).fetchall()
            return found
        finally:
            cursor.close()
