"""Scores every row of a dump: a line out for every line in, malformed ones included, and a summary."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TextIO

from forage_common.v1 import trajectory_pb2
from forage_reward.command.dumps import RowError, parse_row
from forage_reward.router import Judge
from forage_reward.wire import item_of

_CHUNK = 64
_THREADS = 8
MALFORMED = "malformed"
ANY = "any"
"""The judge's only data source, where one reward scores every row."""


@dataclass
class Group:
    """The rows of one data source."""

    statuses: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(self.statuses.values())


@dataclass
class Summary:
    """What became of a dump's rows; `malformed` holds line numbers and reasons."""

    groups: dict[str, Group] = field(default_factory=lambda: defaultdict(Group))
    malformed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups.values()) + len(self.malformed)


def score_lines(
    lines: Iterable[str], judge: Judge, source_of: Callable[[str], str], out: TextIO, advance: Callable[[int], None]
) -> Summary:
    """Score lines of JSON and write one line of JSON for each, in order. Blank lines are skipped.

    Args:
        source_of: the judge's data source for that of a row ("" where the row has none).
        advance: told the length of every line when it is done.
    """
    summary = Summary()
    with ThreadPoolExecutor(_THREADS) as pool:  # rewards that wait for something wait at the same time
        for chunk in _chunks(enumerate(lines, 1)):
            work = [(number, line) for number, line in chunk if line.strip()]
            for record in pool.map(lambda pair: _scored(pair[0], pair[1], judge, source_of), work):
                _count(summary, record)
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
            advance(sum(len(line.encode("utf-8", "replace")) for _, line in chunk))
    return summary


def _scored(number: int, line: str, judge: Judge, source_of: Callable[[str], str]) -> dict[str, Any]:
    try:
        row = parse_row(line)
    except RowError as error:
        return {"line": number, "status": MALFORMED, "detail": str(error)}
    item = item_of(row.view, row.truth)
    item.trajectory_id, item.data_source = f"line {number}", source_of(row.data_source)
    found = judge.score(item)
    return {
        "line": number,
        "data_source": row.data_source or ("" if item.data_source == ANY else item.data_source),
        **_record(found.score),
        "validation": _record(found.validation_score),
    }


def _record(score: trajectory_pb2.Score) -> dict[str, Any]:
    status = trajectory_pb2.Status.Name(score.status).removeprefix("STATUS_").lower()
    return {
        "status": status,
        "total": score.total if score.status == trajectory_pb2.STATUS_OK else None,
        "components": {part.name: {"raw": part.raw, "weighted": part.weighted} for part in score.components},
        "reward": score.reward,
        "detail": score.detail,
    }


def _count(summary: Summary, record: dict[str, Any]) -> None:
    if record["status"] == MALFORMED:
        summary.malformed.append((record["line"], record["detail"]))
        return
    group = summary.groups[record["data_source"]]
    group.statuses[record["status"]] += 1
    if record["total"] is not None:
        group.scores.append(record["total"])
    if record["validation"]["total"] is not None:
        group.validations.append(record["validation"]["total"])


def _chunks(lines: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    while chunk := list(islice(lines, _CHUNK)):
        yield chunk
