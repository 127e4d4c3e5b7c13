"""The dashboards: current, readable by Grafana's model, explained, and about metrics that exist."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from dashboard_queries import FOLDER, dashboards, panels, queries, runnable
from deployment_tools import HELMS, REPOSITORY, grafana_sdk
from helm_chart import rendered
from metrics_page import read_series_names

GRAFANA = REPOSITORY / "deploy/grafana"
NAMES = ("pipeline", "redis", "retriever", "reward", "rollout", "training")
NOT_OURS = {"ALERTS", "up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
"""Prometheus' own, and prometheus_client's of every process."""

VARIABLES = {"pipeline": [], "training": []}
"""Dashboards about more than one service have no instances to choose from."""


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script that writes the dashboards, with the SDK that it needs."""
    for folder in (grafana_sdk(), GRAFANA):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("build")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("build", "forage_dashboards")]:
        del sys.modules[name]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_there_are_exactly_these_dashboards_and_the_chart_has_them() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(NAMES)
    for folder in (FOLDER, REPOSITORY / "deploy/helm/forage/dashboards"):
        found = {path.name: path.read_text() for path in folder.glob("*.json")}
        assert found == {f"{name}.json": (FOLDER / f"{name}.json").read_text() for name in NAMES}


def test_a_dashboard_is_current_and_survives_the_model_of_the_sdk(build: ModuleType, name: str) -> None:
    committed = (FOLDER / f"{name}.json").read_text()
    assert committed == build.render_dashboard(name), "run 'make dashboards' and commit"
    model = importlib.import_module("grafana_foundation_sdk.models.dashboard").Dashboard
    importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    there = json.loads(committed)
    back = build.remove_nulls(json.loads(json.dumps(model.from_json(there), cls=build.JSONEncoder)))
    assert back == there


def test_dashboards_find_each_other_and_let_choose_what_they_are_about(name: str) -> None:
    found = dashboards()[name]
    assert found["uid"] == f"forage-{name}"
    assert found["tags"] == ["forage"]
    (link,) = found["links"]
    assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == ("dashboards", ["forage"], True, True)
    chosen = [variable["name"] for variable in found["templating"]["list"]]
    assert chosen == ["datasource", "namespace", *VARIABLES.get(name, ["instance"])]
    assert found["description"]


def test_every_panel_says_what_it_shows_in_which_unit_and_has_a_place_of_its_own(name: str) -> None:
    found = dashboards()[name]["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    titles = [panel["title"] for panel in panels(name) if panel["type"] == "timeseries"]
    assert len(set(titles)) == len(titles)
    for panel in panels(name):
        assert len(panel["description"]) > 4, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        assert all(target["legendFormat"] for target in panel["targets"])
    for one, other in combinations(found, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in found)


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in (("x", "w"), ("y", "h"))
    )


def test_what_to_look_at_first_is_at_the_top(name: str) -> None:
    first = [panel for panel in dashboards()[name]["panels"] if panel["gridPos"]["y"] == 0]
    assert [panel["type"] for panel in first] == ["stat"] * 6


def test_queries_name_metrics_that_there_are_and_their_labels(name: str) -> None:
    known = read_series_names() | NOT_OURS
    for query in queries(name):
        found = set(re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{", query.expr))
        assert found, query
        assert found <= known, query
        # A legend's label must be one that the query keeps.
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", query.expr), query
        assert 'namespace=~"$namespace"' in query.expr, query


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    every = [query for name in NAMES for query in queries(name)]
    rules = [{"record": f"panel:{number}", "expr": runnable(query.expr)} for number, query in enumerate(every)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(every)} rules found" in checked.stdout


@pytest.mark.parametrize("version", HELMS)
def test_the_chart_installs_every_dashboard_as_it_is(version: str) -> None:
    found: dict[str, str] = {}
    for thing in rendered("every option on", version):
        if thing["kind"] == "ConfigMap" and thing["metadata"]["labels"].get("grafana_dashboard") == "1":
            assert len(json.dumps(thing)) < 2**20, "a ConfigMap holds a megabyte"
            found |= thing["data"]
    assert {file: json.loads(text) for file, text in found.items()} == {
        f"{name}.json": dashboards()[name] for name in NAMES
    }
