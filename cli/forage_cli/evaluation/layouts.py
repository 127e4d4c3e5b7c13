"""Tables in the layout of a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from forage_cli.evaluation.methods import Method


class Layout(StrEnum):
    """Paper whose layout is used."""

    SEARCH_R1 = "search-r1"


SEARCH_R1: Mapping[str, str] = {
    "nq": "NQ†",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA†",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
"""Data source → column of the main table of Jin et al. 2025 (arXiv 2503.09516); † = of the paper's training data."""


@dataclass(frozen=True)
class LayoutRow:
    """Row of a policy and a method: exact match by column, None where not measured; `average` needs all columns."""

    policy: str
    method: Method
    em: tuple[float | None, ...]
    average: float | None


def make_search_r1_rows(results: Sequence[Mapping[str, Any]]) -> list[LayoutRow]:
    """Make the rows of the table; none where no data source is one of the paper's.

    The average is the paper's: the unweighted mean over data sources.

    Args:
        results: the `results` of results.json.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for entry in results:
        if entry["data_source"] in SEARCH_R1 and entry["em"] is not None:
            found.setdefault((entry["policy"], entry["method"]), {})[entry["data_source"]] = entry["em"]["mean"]
    lines = []
    for (policy, method), em in found.items():
        values = tuple(em.get(source) for source in SEARCH_R1)
        known = [value for value in values if value is not None]
        average = fmean(known) if len(known) == len(values) else None
        lines.append(LayoutRow(policy, Method(method), values, average))
    return lines
