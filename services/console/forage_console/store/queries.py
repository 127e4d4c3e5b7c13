"""Filters, orders, pages and counts over the trajectories of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa

from forage_console.models.base import SortOrder
from forage_console.models.trajectories import (
    Facets,
    Range,
    TrajectoryFilter,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryRow,
    TrajectorySort,
)
from forage_console.store.files import DataFile, parse_step
from forage_console.store.run_store import UNREADABLE, RunStore
from forage_console.store.texts import Phrase, cut_snippet, parse_phrases
from forage_console.store.values import SCHEMA, join_text, read_line

STEPS = "steps"
"""All step files."""
_SNIPPETS = ThreadPoolExecutor(4, thread_name_prefix="snippets")
_COLUMNS = tuple(name for name in SCHEMA.names if name != "id")
_SELECTED = ", ".join(f'"{name}"' for name in _COLUMNS)
_NEWEST = 'step DESC NULLS LAST, place, "row"'
_MOST_VALUES = 200
Condition = tuple[str, list[Any]]


def list_rows(store: RunStore, query: TrajectoryQuery) -> TrajectoryPage:
    """List the trajectories that pass a filter, a page of them."""
    began = time.monotonic()
    phrases = parse_phrases(query.text or "")
    condition, values = build_condition(query)
    matches = find_matches(store, query, phrases)
    if matches is not None:
        condition += " AND id IN (SELECT id FROM matches)"
    ((total,),) = store.table.query(f"SELECT count(*) FROM {{table}}.rows WHERE {condition}", values, matches)
    place, own = _build_place(query.place)
    ((everything,),) = store.table.query(f"SELECT count(*) FROM {{table}}.rows WHERE {place}", own)
    order = _build_order(query)
    page = f"SELECT id FROM {{table}}.rows WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?"
    found = store.table.query(  # sorting ids alone, and not all columns, takes a tenth of the time far down a list
        f"SELECT {_SELECTED} FROM {{table}}.rows WHERE id IN ({page}) ORDER BY {order}",
        [*values, query.limit, query.offset],
        matches,
    )
    rows = [make_row(one) for one in found]
    if phrases:
        rows = _add_snippets(store, rows, [one[-1] for one in found], phrases)
    return TrajectoryPage(
        rows=rows,
        total=total,
        all=everything,
        seconds=time.monotonic() - began,
        indexed=store.measure_indexed(),
        loaded=store.measure_loaded(),
    )


def find_rows(store: RunStore, condition: str, values: list[Any], order: str = _NEWEST) -> list[TrajectoryRow]:
    """Find the rows that a condition in SQL selects."""
    found = store.table.query(f"SELECT {_SELECTED} FROM {{table}}.rows WHERE {condition} ORDER BY {order}", values)
    return [make_row(one) for one in found]


def find_matches(store: RunStore, query: TrajectoryFilter, phrases: list[Phrase]) -> pa.Table | None:
    """Find what contains the text of a filter; None without a text."""
    if not phrases:
        return None
    places = [place for place, file in store.files.items() if _may_pass(file, query)]
    return store.find_matches(phrases, places)


def read_facets(store: RunStore, place: str) -> Facets:
    """Count the values that trajectories of a place have."""
    condition, values = _build_place(place)
    where = f"FROM {{table}}.rows WHERE {condition}"

    def count(column: str) -> dict[str, int]:
        known = f"{where} AND {column} IS NOT NULL GROUP BY 1 ORDER BY n DESC, 1 LIMIT {_MOST_VALUES}"
        return dict(store.table.query(f"SELECT {column}, count(*) AS n {known}", values))

    ranges = ", ".join(
        f"min({low}), max({high})"
        for low, high in (("step",) * 2, ("reward",) * 2, ("searches",) * 2, ("version_min", "version_max"))
    )
    ((number, *ends),) = store.table.query(f"SELECT count(*), {ranges} {where}", values)
    found = [
        Range(low=low, high=high) if low is not None else None for low, high in zip(ends[::2], ends[1::2], strict=True)
    ]
    return Facets(
        places=[name for name, _ in sorted(store.files.items(), key=lambda item: (item[1].step or 0, item[0]))],
        sources=count("data_source"),
        statuses=count("status"),
        reasons=count("reason"),
        steps=found[0],
        reward=found[1],
        searches=found[2],
        versions=found[3],
        all=number,
    )


def build_condition(query: TrajectoryFilter) -> Condition:
    """Build the condition of a filter but for its text, in SQL, with its values."""
    condition, values = _build_place(query.place)
    parts = [condition]

    def add(part: str, *more: Any) -> None:
        parts.append(part)
        values.extend(more)

    comparisons: Mapping[str, Any] = {
        "step >= ?": query.step_min,
        "step <= ?": query.step_max,
        "reward >= ?": query.reward_min,
        "reward <= ?": query.reward_max,
        "searches >= ?": query.searches_min,
        "searches <= ?": query.searches_max,
        "version_max >= ?": query.version_min,
        "version_min <= ?": query.version_max,
        "reason = ?": query.reason,
        "truncated = ?": query.truncated,
        "finished = ?": query.finished,
        "trained = ?": query.trained,
        "(em > 0) = ?": query.right,
        "list_contains(?, data_source)": query.source or None,
        "list_contains(?, status)": query.status or None,
    }
    for part, value in comparisons.items():
        if value is not None:
            add(part, value)
    if query.uid:
        add("starts_with(uid, ?)" if query.uid.endswith("/") else "uid = ?", query.uid)
    return " AND ".join(parts), values


def make_row(values: tuple[Any, ...]) -> TrajectoryRow:
    """Make a row of a list from the table's columns."""
    row = dict(zip(_COLUMNS, values, strict=True))
    low, high = row.pop("version_min"), row.pop("version_max")
    del row["line_begin"]
    return TrajectoryRow(**row, versions=None if high is None else (high if low is None else low, high), snippet=None)


def _build_place(place: str) -> Condition:
    return ("step IS NOT NULL", []) if place == STEPS else ("place = ?", [place])


def _build_order(query: TrajectoryQuery) -> str:
    direction = "ASC" if query.order is SortOrder.ASCENDING else "DESC"
    if query.sort is TrajectorySort.PLACE:
        return f'step {direction} NULLS LAST, place, "row"'
    return f"{query.sort.value} {direction} NULLS LAST, {_NEWEST}"


def _may_pass(file: DataFile, query: TrajectoryFilter) -> bool:
    if query.place != STEPS:
        return file.place == query.place
    return file.step is not None and (query.step_min or 0) <= file.step <= (
        file.step if query.step_max is None else query.step_max
    )


def _add_snippets(
    store: RunStore, rows: list[TrajectoryRow], begins: list[int | None], phrases: list[Phrase]
) -> list[TrajectoryRow]:
    """Add the text around the match; where it cannot be read, there is none."""
    groups: dict[str, list[tuple[int, int | None]]] = {}
    for row, begin in zip(rows, begins, strict=True):
        groups.setdefault(row.place, []).append((row.row, begin))
    jobs = {
        place: _SNIPPETS.submit(_read_snippets, store.files[place], wanted, phrases)
        for place, wanted in groups.items()
        if place in store.files
    }
    found = {place: job.result() for place, job in jobs.items()}
    return [row.model_copy(update={"snippet": found.get(row.place, {}).get(row.row)}) for row in rows]


def _read_snippets(
    file: DataFile, wanted: list[tuple[int, int | None]], phrases: list[Phrase]
) -> dict[int, str | None]:
    found: dict[int, str | None] = {}
    with suppress(*UNREADABLE):
        if parse_step(file.place) is None:
            for row, begin in wanted:
                found[row] = cut_snippet(join_text(read_line(file.path, begin or 0)), phrases)
            return found
        rows = sorted({row for row, _ in wanted})
        names = "question", "response"
        tables = file.read_rows(rows, [*names])
        texts = (pair for table in tables for pair in zip(*(table[n].to_pylist() for n in names), strict=True))
        for row, pair in zip(rows, texts, strict=False):
            found[row] = cut_snippet("\n".join(pair), phrases)
    return found
