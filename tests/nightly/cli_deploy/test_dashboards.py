"""The dashboards: up to date, valid for Grafana's model, described, and about metrics that exist."""

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
from dashboard_queries import FOLDER, list_panels, list_queries, load_dashboards, substitute_variables
from deployment_tools import HELMS, REPOSITORY, find_grafana_sdk
from helm_chart import render, render_values
from metrics_page import read_series_names

GRAFANA = REPOSITORY / "deploy/grafana"
NAMES = ("pipeline", "redis", "retriever", "reward", "rollout", "training")
EXTERNAL_METRICS = {"ALERTS", "up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
"""Metrics of Prometheus itself, and of every process by prometheus_client."""

VARIABLES = {"pipeline": [], "training": []}
"""Variables besides data source and namespace, if not `instance`: dashboards of several services have none."""


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script that generates the dashboards, with its SDK importable."""
    for folder in (find_grafana_sdk(), GRAFANA):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("build")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("build", "forage_dashboards")]:
        del sys.modules[name]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    dashboard: str = request.param
    return dashboard


def test_repository_and_chart_have_the_same_dashboards() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(NAMES)
    for folder in (FOLDER, REPOSITORY / "deploy/helm/forage/dashboards"):
        files = {path.name: path.read_text() for path in folder.glob("*.json")}
        assert files == {f"{name}.json": (FOLDER / f"{name}.json").read_text() for name in NAMES}


def test_dashboards_are_up_to_date_and_valid_for_the_sdk(build: ModuleType, name: str) -> None:
    committed = (FOLDER / f"{name}.json").read_text()
    assert committed == build.render_dashboard(name), "run 'make dashboards' and commit"
    model = importlib.import_module("grafana_foundation_sdk.models.dashboard").Dashboard
    importlib.import_module("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    dashboard = json.loads(committed)
    parsed = build.remove_nulls(json.loads(json.dumps(model.from_json(dashboard), cls=build.JSONEncoder)))
    assert parsed == dashboard


def test_dashboards_have_links_and_variables(name: str) -> None:
    dashboard = load_dashboards()[name]
    assert dashboard["uid"] == f"forage-{name}"
    assert dashboard["tags"] == ["forage"]
    (link,) = dashboard["links"]
    assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == ("dashboards", ["forage"], True, True)
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert variables == ["datasource", "namespace", *VARIABLES.get(name, ["instance"])]
    assert dashboard["description"]


def test_panels_have_a_description_a_unit_and_do_not_overlap(name: str) -> None:
    with_rows = load_dashboards()[name]["panels"]
    assert len({panel["id"] for panel in with_rows}) == len(with_rows)
    titles = [panel["title"] for panel in list_panels(name) if panel["type"] == "timeseries"]
    assert len(set(titles)) == len(titles)
    for panel in list_panels(name):
        assert len(panel["description"]) > 4, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        assert all(target["legendFormat"] for target in panel["targets"])
    for left, right in combinations(with_rows, 2):
        assert not do_overlap(left["gridPos"], right["gridPos"]), (left["title"], right["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in with_rows)


def do_overlap(left: dict[str, int], right: dict[str, int]) -> bool:
    return all(
        left[start] < right[start] + right[size] and right[start] < left[start] + left[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_the_first_row_has_six_stat_panels(name: str) -> None:
    first = [panel for panel in load_dashboards()[name]["panels"] if panel["gridPos"]["y"] == 0]
    assert [panel["type"] for panel in first] == ["stat"] * 6


def test_queries_use_metrics_and_labels_that_exist(name: str) -> None:
    known = read_series_names() | EXTERNAL_METRICS
    for query in list_queries(name):
        used = set(re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{", query.expr))
        assert used, query
        assert used <= known, query
        # The query must keep the labels of its legend.
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert re.search(rf"by \([^)]*\b{label}\b[^)]*\)", query.expr), query
        assert 'namespace=~"$namespace"' in query.expr, query


def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    all_queries = [query for name in NAMES for query in list_queries(name)]
    rules = [
        {"record": f"panel:{number}", "expr": substitute_variables(query.expr)}
        for number, query in enumerate(all_queries)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(all_queries)} rules found" in checked.stdout


@pytest.mark.parametrize("version", HELMS)
def test_the_chart_installs_the_dashboards_unchanged(version: str) -> None:
    installed: dict[str, str] = {}
    for item in render("every option on", version):
        if item["kind"] == "ConfigMap" and item["metadata"]["labels"].get("grafana_dashboard") == "1":
            assert len(json.dumps(item)) < 2**20, "a ConfigMap is limited to 1 MiB"
            installed |= item["data"]
    found = {file: json.loads(text) for file, text in installed.items()}
    expected = {f"training-forage-{name}.json": load_dashboards()[name] for name in NAMES}
    uids = {shown.pop("uid") for shown in found.values()}
    assert {
        file: {key: value for key, value in shown.items() if key != "uid"} for file, shown in expected.items()
    } == found
    assert len(uids) == len(NAMES)
    assert all(len(uid) <= 40 for uid in uids)


def test_two_releases_have_dashboards_of_their_own() -> None:
    """Grafana's sidecar writes all into one folder, and Grafana takes no name or uid twice."""
    seen: list[set[str]] = []
    for values in ({}, {"fullnameOverride": "other"}):
        objects = render_values({"monitoring": {"dashboards": {"enabled": True}}, **values})
        shown = [item for item in objects if item["metadata"]["labels"].get("grafana_dashboard")]
        names = {name for item in shown for name in item["data"]}
        uids = {json.loads(text)["uid"] for item in shown for text in item["data"].values()}
        folders = {item["metadata"]["annotations"]["grafana_folder"] for item in shown}
        seen.append(names | uids | folders)
    assert seen[0]
    assert not seen[0] & seen[1]
