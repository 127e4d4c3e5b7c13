"""Result files of an evaluation: one row per question, the trajectories, and the metrics computed from the rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forage_cli.evaluation.measures import QuestionResult, measure_question
from forage_cli.evaluation.pass_at_k import majority_at_k, pass_at_k, sample_counts
from forage_cli.evaluation.plan import ROWS, Item, read_manifest
from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_records.statistics import ALL, estimate_mean, mean_known
from forage_records.trajectory_file import TrajectoryWriter
from forage_runtime.errors import DataError
from forage_runtime.files import durable

RESULTS, TRAJECTORIES = "results.json", "trajectories"
ESTIMATED = ("em", "sub_em", "f1")
"""Metrics with an interval."""
AVERAGED = (
    "searches",
    "turns",
    "hit",
    "truncated",
    "finished",
    "format",
    "prompt_tokens",
    "generated_tokens",
    "seconds",
)
_FAILURES = 20
_FLOATS = (*ESTIMATED, *AVERAGED)
_TEXT, _COUNT = pa.string(), pa.uint32()
_SCHEMA = pa.schema(
    [
        *((name, _TEXT) for name in ("policy", "method", "data_source", "uid", "question")),
        ("targets", pa.list_(_TEXT)),
        ("judged", _COUNT),
        ("failed", _COUNT),
        ("failure", _TEXT),
        *((name, pa.float64()) for name in _FLOATS),
        ("answers", pa.list_(_TEXT)),
        ("rights", pa.list_(pa.bool_())),
        ("versions", pa.list_(pa.uint64())),
    ]
)


def trajectory_file(folder: Path, policy: str, method: str) -> Path:
    """Path of the trajectories of a policy and a method."""
    return folder / TRAJECTORIES / f"{policy}-{method}.parquet"


def write_results(folder: Path, finished: Iterable[tuple[Item, TrajectoryGroup]], turn_ends: Mapping[str, str]) -> None:
    """Measure the finished items; write results.parquet and trajectories/, each file atomically.

    Args:
        turn_ends: label of a policy → text with which its tokenizer ends a turn.
    """
    rows: list[tuple[int, QuestionResult]] = []
    with ExitStack() as stack:
        writers: dict[Path, TrajectoryWriter] = {}
        for item, group in finished:
            rows.append(
                (item.index, measure_question(item.policy.label, item.method, item.question, group.trajectories))
            )
            file = trajectory_file(folder, item.policy.label, item.method)
            if file not in writers:
                writers[file] = stack.enter_context(TrajectoryWriter(file, turn_ends[item.policy.label]))
            for trajectory in group.trajectories:
                writers[file].write(trajectory)
    ordered = [asdict(row) for _, row in sorted(rows, key=itemgetter(0))]
    with durable.stage_file(folder / ROWS) as partial:
        pq.write_table(pa.Table.from_pylist(ordered, schema=_SCHEMA), partial, compression="zstd")


def write_summary(folder: Path) -> dict[str, Any]:
    """Write results.json from results.parquet, and return its content.

    Raises:
        DataError: there are no results, or they are damaged.
    """
    rows = read_rows(folder)
    failures = [row for row in rows if row.failed]
    summary = {
        **read_manifest(folder),
        "made_unix_s": int(time.time()),
        "results": [
            compute_metrics(found, policy, method, source)
            for (policy, method, source), found in group_by_source(rows).items()
        ],
        "versions": {
            policy: sorted({version for row in rows if row.policy == policy for version in row.versions})
            for policy in dict.fromkeys(row.policy for row in rows)
        },
        "failures": [
            {"policy": row.policy, "method": row.method, "uid": row.uid, "failure": row.failure}
            for row in failures[:_FAILURES]
        ],
    }
    durable.write_atomically(folder / RESULTS, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def read_rows(folder: Path) -> list[QuestionResult]:
    """Read every row, ordered by policy and method as in the plan, then by question.

    Raises:
        DataError: the folder is no evaluation, or it is not finished, or damaged.
    """
    manifest = read_manifest(folder)
    file = folder / ROWS
    if not file.exists():
        raise DataError(f"{folder} is not finished (it has no {ROWS}): run the same 'forage eval' again to go on")
    try:
        found = [QuestionResult.from_row(row) for row in pq.read_table(file).to_pylist()]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{file} is damaged ({error}): run the same 'forage eval' again") from None
    labels = [policy["label"] for policy in manifest["policies"]]
    return sorted(found, key=lambda row: (labels.index(row.policy), manifest["methods"].index(row.method)))


def group_by_source(rows: Sequence[QuestionResult]) -> dict[tuple[str, str, str], list[QuestionResult]]:
    """Group rows by policy, method and data source; with several data sources, `ALL` has every row."""
    sources = dict.fromkeys(row.data_source for row in rows)
    found: dict[tuple[str, str, str], list[QuestionResult]] = {}
    for policy, method in dict.fromkeys((row.policy, row.method) for row in rows):
        own = [row for row in rows if (row.policy, row.method) == (policy, method)]
        for source in sources:
            if some := [row for row in own if row.data_source == source]:
                found[policy, method, source] = some
        if len(sources) > 1:
            found[policy, method, ALL] = own
    return found


def compute_metrics(rows: Sequence[QuestionResult], policy: str, method: str, source: str) -> dict[str, Any]:
    """Compute the metrics of a policy and a method on a data source. Questions have equal weight."""
    found: dict[str, Any] = {
        "policy": policy,
        "method": method,
        "data_source": source,
        "questions": sum(row.judged > 0 for row in rows),
        "failed_questions": sum(row.judged == 0 for row in rows),
        "samples": sum(row.judged for row in rows),
        "failed_samples": sum(row.failed for row in rows),
    }
    for name in ESTIMATED:
        found[name] = _estimate_interval([value for row in rows if (value := getattr(row, name)) is not None])
    found |= {name: mean_known(getattr(row, name) for row in rows) for name in AVERAGED}
    most = max((row.judged for row in rows), default=0)
    if most > 1:
        for name, measure_row in (("pass_at_k", _compute_pass_at_k), ("majority_at_k", _compute_majority_at_k)):
            found[name] = {
                str(k): _estimate_interval([measure_row(row, k) for row in rows if row.judged >= k])
                for k in sample_counts(most)
            }
    return found


def _compute_pass_at_k(row: QuestionResult, k: int) -> float:
    return pass_at_k(sum(row.rights), row.judged, k)


def _compute_majority_at_k(row: QuestionResult, k: int) -> float:
    return majority_at_k(row.answers, row.rights, k)


def _estimate_interval(values: Sequence[float]) -> Mapping[str, float] | None:
    found = estimate_mean(values)
    return None if found is None else asdict(found)
