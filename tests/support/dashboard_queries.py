"""The committed dashboards as their tests read them: panels, queries, and queries without Grafana's variables."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "deploy/grafana/dashboards"
Object = dict[str, Any]


class PanelQuery(NamedTuple):
    """One query of a panel."""

    dashboard: str
    panel: str
    expr: str
    legend: str


@functools.cache
def dashboards() -> dict[str, Object]:
    """By the name of their file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def panels(name: str) -> list[Object]:
    """Those of a dashboard, without the rows."""
    return [panel for panel in dashboards()[name]["panels"] if panel["type"] != "row"]


def queries(name: str) -> Iterator[PanelQuery]:
    """Every query of a dashboard."""
    for panel in panels(name):
        for target in panel["targets"]:
            yield PanelQuery(name, panel["title"], target["expr"], target["legendFormat"])


def runnable(expr: str, rate: str = "1m", shown: str = "10m") -> str:
    """A query as Grafana would send it, everything chosen.

    Args:
        rate, shown: the time of a rate, and the time that the dashboard shows.
    """
    chosen = {"namespace": ".*", "instance": ".*", "__rate_interval": rate, "__range": shown}
    return re.sub(r"\$(\w+)", lambda found: chosen[found[1]], expr)
