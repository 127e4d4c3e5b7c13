"""Paired comparison of two sets of answers to the same questions: difference, interval, and changed questions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forage_cli.evaluation.measures import QuestionResult
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.results import read_rows, trajectory_file
from forage_proto.v1.trajectory_pb2 import Trajectory
from forage_records.statistics import Outcome, SourceComparison, compare_sources, find_outcome
from forage_records.trajectory_file import read_trajectories
from forage_runtime.errors import DataError, UserError


@dataclass(frozen=True)
class Selection:
    """One policy with one method of an evaluation."""

    folder: Path
    policy: str
    method: str

    def __str__(self) -> str:
        return f"{self.folder.name}:{self.policy}/{self.method}"


@dataclass(frozen=True)
class Pair:
    """A question that both sides answered."""

    a: QuestionResult
    b: QuestionResult

    @property
    def outcome(self) -> Outcome:
        return find_outcome(self.a.em or 0.0, self.b.em or 0.0)


@dataclass(frozen=True)
class Comparison:
    """Comparison of B with A.

    Attributes:
        only_a, only_b: number of questions that the other side lacks or failed.
    """

    a: Selection
    b: Selection
    pairs: tuple[Pair, ...]
    only_a: int
    only_b: int
    sources: tuple[SourceComparison, ...]

    def pairs_with(self, outcome: Outcome) -> list[Pair]:
        """Return the questions with this outcome, the largest change first."""
        pairs = [pair for pair in self.pairs if pair.outcome is outcome]
        return sorted(pairs, key=lambda pair: -abs((pair.b.em or 0.0) - (pair.a.em or 0.0)))


def read_selection(text: str) -> tuple[Selection, list[QuestionResult]]:
    """Read the rows of `FOLDER[:POLICY[/METHOD]]`; POLICY defaults to the first, METHOD to `search`.

    Raises:
        UserError: the folder has no such policy or method; the message says which it has.
        DataError: the folder is no finished evaluation.
    """
    folder, chosen = _split_selection(text)
    rows = read_rows(folder)
    policy, _, method = chosen.partition("/")
    policy, method = policy or rows[0].policy, method or Method.SEARCH
    selected = [row for row in rows if (row.policy, row.method) == (policy, method)]
    if not selected:
        known = ", ".join(dict.fromkeys(f"{row.policy}/{row.method}" for row in rows))
        raise UserError(f"{folder} has no {policy}/{method}: it has {known}")
    return Selection(folder, policy, method), selected


def compare_selections(a: str, b: str) -> Comparison:
    """Compare two selections on the questions that both answered.

    Raises:
        UserError, DataError: as `read_selection`; or no question is in both, or one uid has two texts.
    """
    (one, before), (other, after) = read_selection(a), read_selection(b)
    earlier, later = _index_by_uid(before), _index_by_uid(after)
    pairs = [Pair(earlier[uid], later[uid]) for uid in earlier if uid in later]
    if not pairs:
        raise UserError(f"{one} and {other} have no question in common: evaluate both on the same files")
    for pair in pairs:
        if (pair.a.question, pair.a.targets) != (pair.b.question, pair.b.targets):
            raise DataError(
                f"question {pair.a.uid} of {one} is another than that of {other} "
                f"({pair.a.question!r}, {pair.b.question!r}): evaluate both on the same files"
            )
    return Comparison(
        one,
        other,
        tuple(pairs),
        len(earlier.keys() - later.keys()),
        len(later.keys() - earlier.keys()),
        tuple(compare_sources((pair.a.data_source, pair.a.em or 0.0, pair.b.em or 0.0) for pair in pairs)),
    )


def read_first_samples(selection: Selection, uids: Iterable[str]) -> dict[str, Trajectory]:
    """Read the first sample of each question from the evaluation's files."""
    wanted = {f"{uid}/{selection.method}": uid for uid in uids}
    file = trajectory_file(selection.folder, selection.policy, selection.method)
    return {wanted[t.group_uid]: t for t in read_trajectories(file) if t.sample == 0 and t.group_uid in wanted}


def _split_selection(text: str) -> tuple[Path, str]:
    if Path(text).exists():
        return Path(text), ""
    folder, colon, chosen = text.rpartition(":")
    return (Path(folder), chosen) if colon else (Path(text), "")


def _index_by_uid(rows: Iterable[QuestionResult]) -> dict[str, QuestionResult]:
    return {row.uid: row for row in rows if row.em is not None}
