"""A selection of trajectories as one Parquet file, made while it is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from forage_console.models.trajectories import TrajectoryFilter
from forage_console.store.files import DataFile
from forage_console.store.queries import STEPS, build_condition, find_matches
from forage_console.store.run_store import RunStore
from forage_console.store.texts import parse_phrases
from forage_runtime.errors import UserError

_OF_ONE_STEP = b"forage.groups"


def export_rows(store: RunStore, query: TrajectoryFilter) -> Iterator[bytes]:
    """Select the trajectories that pass a filter, and return the parts of a file with them, by step.

    Raises:
        UserError: they are of a validation, or none passes.
    """
    if query.place != STEPS and (query.place not in store.files or store.files[query.place].step is None):
        raise UserError(f"place '{query.place[:100]}' has no step files to export: choose steps, or step-<n>")
    condition, values = build_condition(query)
    matches = find_matches(store, query, parse_phrases(query.text or ""))
    if matches is not None:
        condition += " AND id IN (SELECT id FROM matches)"
    found = store.table.query(
        'SELECT place, list("row" ORDER BY "row") FROM {table}.rows '
        f"WHERE {condition} GROUP BY place, step ORDER BY step",
        values,
        matches,
    )
    chosen = [(store.files[place], rows) for place, rows in found if place in store.files]
    if not chosen:
        raise UserError("no trajectory passes the filter: there is nothing to export")
    schemas = [_read_schema(file) for file, _ in chosen]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    kept = {key: value for key, value in (schemas[-1].metadata or {}).items() if key != _OF_ONE_STEP}
    return _write(chosen, schema.with_metadata(kept))


class _Sink:
    """Keeps what was written until it is taken."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, part: bytes) -> int:
        self._parts.append(bytes(part))
        return len(part)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _write(chosen: list[tuple[DataFile, list[int]]], schema: pa.Schema) -> Iterator[bytes]:
    sink = _Sink()
    with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd") as writer:
        for file, rows in chosen:
            for table in file.read_rows(rows):
                columns = [
                    table[field.name].cast(field.type)
                    if field.name in table.schema.names
                    else pa.nulls(table.num_rows, field.type)
                    for field in schema
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                yield sink.take()
    yield sink.take()


def _read_schema(file: DataFile) -> pa.Schema:
    with file.open_parquet() as parquet:
        return parquet.schema_arrow
