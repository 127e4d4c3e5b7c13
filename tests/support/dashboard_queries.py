"""Reads the committed dashboards: panels, queries, and queries with Grafana's variables replaced."""

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
def load_dashboards() -> dict[str, Object]:
    """Load every dashboard, by the name of its file."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def list_panels(name: str) -> list[Object]:
    """List the panels of a dashboard, without the rows."""
    return [panel for panel in load_dashboards()[name]["panels"] if panel["type"] != "row"]


def list_queries(name: str) -> Iterator[PanelQuery]:
    """List every query of a dashboard."""
    for panel in list_panels(name):
        for target in panel["targets"]:
            yield PanelQuery(name, panel["title"], target["expr"], target["legendFormat"])


def substitute_variables(expr: str, rate_interval: str = "1m", time_range: str = "10m") -> str:
    """Replace Grafana's variables in a query; all namespaces and instances are selected."""
    variables = {"namespace": ".*", "instance": ".*", "__rate_interval": rate_interval, "__range": time_range}
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]], expr)
