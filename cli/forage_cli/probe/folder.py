"""A folder of probes: its plan, the finished probes and their summary. The same command continues an interrupted one.

`plan.json` says what is probed and how, `journal.bin` holds every finished probe, `trajectories.bin` the finished
trajectories of a file of questions. At the end `probes.parquet` has a row a probe, and `summary.json` the measures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forage_cli.runs.journal import Journal
from forage_probe import metrics
from forage_probe.metrics import count_computed_tokens, summarise_probes
from forage_proto.v1.probe_pb2 import CotBoundary, Probed
from forage_proto.v1.trajectory_pb2 import Status, Trajectory
from forage_runtime.errors import DataError, UserError
from forage_runtime.files import durable
from forage_runtime.text.enums import name_value

_SCHEMA = pa.schema(
    [
        ("trajectory", pa.string()),
        ("turn", pa.uint32()),
        ("data_source", pa.string()),
        ("correct", pa.bool_()),
        ("status", pa.string()),
        ("status_detail", pa.string()),
        ("boundary", pa.string()),
        ("thought_tokens", pa.uint32()),
        ("kept", pa.list_(pa.uint32())),
        ("confidence", pa.list_(pa.float64())),
        ("low", pa.list_(pa.float64())),
        ("high", pa.list_(pa.float64())),
        ("answer", pa.list_(pa.string())),
        ("rho", pa.float64()),
        ("premature", pa.bool_()),
        ("overconfidence", pa.float64()),
        ("auc_gap", pa.float64()),
        ("norm_aoc", pa.float64()),
        ("aoc", pa.float64()),
        ("computed_tokens", pa.uint64()),
        ("cached_tokens", pa.uint64()),
        ("seconds", pa.float64()),
        ("probed", pa.binary()),
    ]
)


class ProbeFolder:
    """The files of one probe of many trajectories.

    Attributes:
        trajectories: those of a file of questions, once all are sampled.
        report: the page.

    Args:
        plan: what is probed and how; numbers and texts by name. What serves it follows by `agree`.
        fresh: forget what the folder holds.

    Raises:
        UserError: the folder holds probes of another plan.
        DataError: it cannot be written to.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any], fresh: bool = False) -> None:
        self.path = path
        self.trajectories = path / "trajectories.parquet"
        self.report = path / "report.html"
        self._plan: dict[str, Any] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            if fresh:
                for name in ("plan.json", "journal.bin", "trajectories.bin", "trajectories.parquet"):
                    (path / name).unlink(missing_ok=True)
            self.agree(**plan)
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror or error}): choose another --out") from None

    def journal(self) -> Journal[Probed]:
        """The finished probes."""
        return Journal(self.path / "journal.bin", Probed)

    def sampled(self) -> Journal[Trajectory]:
        """The finished trajectories of a file of questions."""
        return Journal(self.path / "trajectories.bin", Trajectory)

    def finish(self, probes: Sequence[Probed]) -> dict[str, Any]:
        """Write the table and the summary; returns the summary."""
        table = pa.Table.from_pylist([_row(probed) for probed in probes], _SCHEMA)
        pq.write_table(table, self.path / "probes.parquet", compression="zstd")
        found = summarise_probes(self._plan, probes)
        durable.write_atomically(self.path / "summary.json", json.dumps(found, indent=2) + "\n")
        return found

    def agree(self, **part: Any) -> None:
        """Add to the plan, or find it there as it is now.

        Raises:
            UserError: the folder holds probes of another plan.
        """
        file = self.path / "plan.json"
        try:
            self._plan = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except ValueError as error:
            raise DataError(f"{file} is damaged ({error}): give --fresh to start again") from None
        for name, value in part.items():
            if self._plan.setdefault(name, value) != value:
                raise UserError(
                    f"{self.path} holds probes with {name} {self._plan[name]}, now it is {value}: "
                    "choose another --out, or give --fresh to start again"
                )
        durable.write_atomically(file, json.dumps(self._plan, indent=2) + "\n")


def hash_file(file: Path) -> str:
    """SHA-256 of a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): give a Parquet file") from None


def _row(probed: Probed) -> dict[str, Any]:
    row: dict[str, Any] = {
        "trajectory": probed.trajectory_id,
        "turn": probed.turn,
        "data_source": probed.data_source,
        "correct": probed.correct,
        "status": name_value(Status, probed.status),
        "status_detail": probed.status_detail,
        "boundary": name_value(CotBoundary, probed.boundary),
        "thought_tokens": probed.cot_end - probed.cot_begin,
        "seconds": probed.seconds,
        "probed": probed.SerializeToString(),
    }
    if probed.status != Status.STATUS_OK:
        return row
    measures = asdict(metrics.measure(probed))
    low, high = zip(*measures.pop("intervals"), strict=True)
    return row | {
        **measures,
        "low": low,
        "high": high,
        "kept": [point.kept for point in probed.points],
        "answer": [metrics.most_frequent_answer(point) for point in probed.points],
        "computed_tokens": count_computed_tokens(probed),
        "cached_tokens": sum(point.cached_tokens for point in probed.points),
    }
