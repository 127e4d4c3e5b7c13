"""Scores every row of a dump: one line out for every line in, including malformed ones, and a summary."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TextIO

from forage_proto.v1 import trajectory_pb2
from forage_reward.command.dumps import RowError, parse_row
from forage_reward.router import RewardRouter
from forage_reward.wire import build_item, format_status

_CHUNK = 64
_THREADS = 8
MALFORMED = "malformed"
ANY = "any"
"""The only data source of a router whose one reward scores every row."""


@dataclass
class SourceSummary:
    """The rows of one data source."""

    statuses: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(self.statuses.values())


@dataclass
class Summary:
    """The results of a dump by data source; `malformed` holds line numbers and reasons."""

    sources: dict[str, SourceSummary] = field(default_factory=lambda: defaultdict(SourceSummary))
    malformed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources.values()) + len(self.malformed)

    def add_record(self, record: dict[str, Any]) -> None:
        if record["status"] == MALFORMED:
            self.malformed.append((record["line"], record["detail"]))
            return
        source = self.sources[record["data_source"]]
        source.statuses[record["status"]] += 1
        if record["total"] is not None:
            source.scores.append(record["total"])
        if record["validation"]["total"] is not None:
            source.validations.append(record["validation"]["total"])


def score_lines(
    lines: Iterable[str],
    router: RewardRouter,
    map_source: Callable[[str], str],
    out: TextIO,
    advance: Callable[[int], None],
) -> Summary:
    """Score lines of JSON and write one line of JSON for each, in order. Blank lines are skipped.

    Args:
        map_source: returns the router's data source for that of a row ("" where the row has none).
        advance: called with the number of bytes of every chunk when it is done.
    """
    summary = Summary()
    with ThreadPoolExecutor(_THREADS) as pool:  # so that blocking rewards wait at the same time
        for chunk in _split_chunks(enumerate(lines, 1)):
            rows = [(number, line) for number, line in chunk if line.strip()]
            for record in pool.map(lambda row: _score_line(row[0], row[1], router, map_source), rows):
                summary.add_record(record)
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
            advance(sum(len(line.encode("utf-8", "replace")) for _, line in chunk))
    return summary


def _score_line(number: int, line: str, router: RewardRouter, map_source: Callable[[str], str]) -> dict[str, Any]:
    try:
        row = parse_row(line)
    except RowError as error:
        return {"line": number, "status": MALFORMED, "detail": str(error)}
    item = build_item(row.view, row.truth)
    item.trajectory_id, item.data_source = f"line {number}", map_source(row.data_source)
    reply = router.score(item)
    return {
        "line": number,
        "data_source": row.data_source or ("" if item.data_source == ANY else item.data_source),
        **_build_record(reply.score),
        "validation": _build_record(reply.validation_score),
    }


def _build_record(score: trajectory_pb2.Score) -> dict[str, Any]:
    return {
        "status": format_status(score.status),
        "total": score.total if score.status == trajectory_pb2.STATUS_OK else None,
        "components": {part.name: {"raw": part.raw, "weighted": part.weighted} for part in score.components},
        "reward": score.reward,
        "detail": score.detail,
    }


def _split_chunks(lines: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    while chunk := list(islice(lines, _CHUNK)):
        yield chunk
