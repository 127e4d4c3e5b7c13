"""Two sets of answers to the same questions: the difference, whether it is one, and where they part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean

from forage_cli.evaluation.measures import QuestionResult
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.results import ALL, read_rows, trajectory_file
from forage_common.errors import DataError, UserError
from forage_common.files.trajectory_file import read_trajectories
from forage_common.statistics import Difference, paired_difference
from forage_common.v1.trajectory_pb2 import Trajectory


class Outcome(StrEnum):
    """What became of a question from A to B; with several samples, by the share that is right."""

    WON = "won"
    LOST = "lost"
    BOTH = "both"
    NEITHER = "neither"


@dataclass(frozen=True)
class Selection:
    """A policy and a method of an evaluation."""

    folder: Path
    policy: str
    method: str

    def __str__(self) -> str:
        return f"{self.folder.name}:{self.policy}/{self.method}"


@dataclass(frozen=True)
class Pair:
    """A question that both sides have an answer to."""

    a: QuestionResult
    b: QuestionResult

    @property
    def outcome(self) -> Outcome:
        before, after = self.a.em or 0.0, self.b.em or 0.0
        if before == after:
            return Outcome.BOTH if after else Outcome.NEITHER
        return Outcome.WON if after > before else Outcome.LOST


@dataclass(frozen=True)
class SourceComparison:
    """One data source, or all of them."""

    data_source: str
    questions: int
    em_a: float
    em_b: float
    difference: Difference
    outcomes: Mapping[Outcome, int]


@dataclass(frozen=True)
class Comparison:
    """B against A.

    Attributes:
        only_a, only_b: questions that the other side lacks, or failed at.
    """

    a: Selection
    b: Selection
    pairs: tuple[Pair, ...]
    only_a: int
    only_b: int
    sources: tuple[SourceComparison, ...]

    def pairs_with(self, outcome: Outcome) -> list[Pair]:
        """The questions with this outcome, those with the largest change first."""
        found = [pair for pair in self.pairs if pair.outcome is outcome]
        return sorted(found, key=lambda pair: -abs((pair.b.em or 0.0) - (pair.a.em or 0.0)))


def read_selection(text: str) -> tuple[Selection, list[QuestionResult]]:
    """What `FOLDER[:POLICY[/METHOD]]` means, and its rows; without a policy the first, without a method `search`.

    Raises:
        UserError: the folder has no such policy or method; says which it has.
        DataError: the folder is no finished evaluation.
    """
    folder, chosen = _split_selection(text)
    rows = read_rows(folder)
    policy, _, method = chosen.partition("/")
    policy, method = policy or rows[0].policy, method or Method.SEARCH
    found = [row for row in rows if (row.policy, row.method) == (policy, method)]
    if not found:
        there = ", ".join(dict.fromkeys(f"{row.policy}/{row.method}" for row in rows))
        raise UserError(f"{folder} has no {policy}/{method}: it has {there}")
    return Selection(folder, policy, method), found


def compare_selections(a: str, b: str) -> Comparison:
    """Compare two selections on the questions that both have answered.

    Raises:
        UserError, DataError: as `select`; or they have no question in common, or different ones of the same name.
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
    sources = list(dict.fromkeys(pair.a.data_source for pair in pairs))
    parts = {source: [pair for pair in pairs if pair.a.data_source == source] for source in sources}
    if len(sources) > 1:
        parts[ALL] = pairs
    return Comparison(
        one,
        other,
        tuple(pairs),
        len(earlier.keys() - later.keys()),
        len(later.keys() - earlier.keys()),
        tuple(_compare_source(source, some) for source, some in parts.items()),
    )


def read_first_samples(selection: Selection, uids: Iterable[str]) -> dict[str, Trajectory]:
    """The first sample of each question, read from the evaluation's files."""
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


def _compare_source(source: str, pairs: Sequence[Pair]) -> SourceComparison:
    before, after = [pair.a.em or 0.0 for pair in pairs], [pair.b.em or 0.0 for pair in pairs]
    counts = Counter(pair.outcome for pair in pairs)
    return SourceComparison(
        source,
        len(pairs),
        fmean(before),
        fmean(after),
        paired_difference(before, after),
        {outcome: counts[outcome] for outcome in Outcome},
    )
