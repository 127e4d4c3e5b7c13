"""Alert rules: valid for Prometheus, tested in both directions, documented, and about metrics that exist."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deployment_tools import HELMS, REPOSITORY
from helm_chart import CHART, render, render_values
from prometheus_scrape import EXPORTER
from pydantic import BaseModel
from typer.main import get_command
from waiting import WAIT_S, wait_until

from forage_cli.main import app
from forage_runtime.settings import RedisSettings, Settings

RULES = REPOSITORY / "deploy/prometheus/rules"
TESTS = REPOSITORY / "deploy/prometheus/tests"
RUNBOOKS = REPOSITORY / "docs/runbooks"
SEVERITIES = {"critical", "warning", "info"}
SECTIONS = ["First checks", "Symptoms", "Causes, most likely first", "Silencing and tuning"]
EXPORTED = {
    "up": set(),
    "process_start_time_seconds": set(),
    "redis_up": set(),
    "redis_aof_enabled": set(),
    "redis_aof_last_write_status": set(),
    "redis_aof_last_bgrewrite_status": set(),
    "redis_memory_used_bytes": set(),
    "redis_memory_max_bytes": set(),
}
"""Metrics of Prometheus, its client and redis_exporter → labels."""

TARGET_LABELS = {"namespace", "job", "instance"}
_METRIC = re.compile(r"\b(?:forage|redis|process)_[a-z0-9_]+|\bup\b")
_RECORDED = re.compile(r"\b[a-z]+:[a-z0-9_]+:[a-z0-9]+")
_SELECTOR = re.compile(r"\b([a-z_:0-9]+)\{([^}]*)\}")
_PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(_PROMTOOL is None, reason="promtool is missing: apt-get install prometheus")

Rule = dict[str, Any]


def run_promtool(*arguments: str | Path) -> str:
    """Run promtool, which must succeed, and return its output."""
    ended = subprocess.run([str(_PROMTOOL), *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@functools.cache
def load_rules() -> dict[Path, list[Rule]]:
    files = {path: yaml.safe_load(path.read_text())["groups"] for path in sorted(RULES.glob("*.yaml"))}
    return {path: [rule for group in groups for rule in group["rules"]] for path, groups in files.items()}


ALERTS = {rule["alert"]: rule for rules in load_rules().values() for rule in rules if "alert" in rule}
RECORDED = {rule["record"]: rule for rules in load_rules().values() for rule in rules if "record" in rule}


def load_cases() -> Iterator[dict[str, Any]]:
    for path in sorted(TESTS.glob("*.yaml")):
        yield from yaml.safe_load(path.read_text())["tests"]


@functools.cache
def read_documented_series() -> dict[str, set[str]]:
    """Read all series and their labels from docs/reference/metrics.md, which is generated and tested to be current."""
    series: dict[str, set[str]] = {}
    for line in (REPOSITORY / "docs/reference/metrics.md").read_text().splitlines():
        if row := re.match(r"\| `(forage_[a-z0-9_]+)` \| ([a-z]+) \| ([^|]*)\|", line):
            name, kind, labels = row[1], row[2], set(re.findall(r"`(\w+)`", row[3]))
            if kind == "histogram":
                series |= {name + "_bucket": labels | {"le"}, name + "_sum": labels, name + "_count": labels}
            else:
                series[name] = labels
    assert len(series) > 50, "docs/reference/metrics.md has a layout that this test cannot read"
    return series | EXPORTED


def assert_metrics_exist(expression: str, where: str) -> None:
    """Assert that every metric in an expression exists and has every label in its selector."""
    known = read_documented_series() | {name: set() for name in RECORDED}
    names = set(_RECORDED.findall(expression)) | set(_METRIC.findall(_RECORDED.sub("", expression)))
    assert names, f"{where} contains no metric"
    assert names <= known.keys(), f"{where} uses metrics that do not exist: {sorted(names - known.keys())}"
    for name, selector in _SELECTOR.findall(expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        unknown = labels - known[name] - TARGET_LABELS
        assert not unknown, f"{where}: {name} has no label {sorted(unknown)}"


@needs_promtool
def test_prometheus_accepts_the_rules() -> None:
    assert "FAILED" not in run_promtool("check", "rules", *load_rules())


@needs_promtool
@pytest.mark.parametrize("path", sorted(TESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_alerts_pass_their_unit_tests(path: Path) -> None:
    run_promtool("test", "rules", path)


@needs_promtool
def test_a_rule_that_is_never_true_fails_its_unit_tests(tmp_path: Path) -> None:
    shutil.copytree(RULES.parent, tmp_path / "prometheus")
    broken = tmp_path / "prometheus/rules/retriever.yaml"
    broken.write_text(broken.read_text().replace("request_seconds:p99 > 1", "request_seconds:p99 > 1000"))
    test = tmp_path / "prometheus/tests/retriever.yaml"
    ended = subprocess.run([str(_PROMTOOL), "test", "rules", str(test)], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "ForageRetrieverSlow" in ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_firing_and_a_silent_test_case(name: str) -> None:
    firing, silent = [], []
    for case in load_cases():
        checks = [check for check in case["alert_rule_test"] if check["alertname"] == name]
        if checks:
            (firing if any(check.get("exp_alerts") for check in checks) else silent).append(case["name"])
    assert firing, "no case in which the alert fires"
    assert silent, "no case in which the alert does not fire"


def test_unit_tests_of_alerts_use_series_that_exist() -> None:
    for case in load_cases():
        for series in case["input_series"]:
            assert_metrics_exist(series["series"], case["name"])


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_severity_annotations_and_a_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert "for" in alert
    assert alert["labels"]["severity"] in SEVERITIES
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
    lines = (RUNBOOKS / f"{name}.md").read_text().splitlines()
    assert lines[0] == f"# {name}"
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == SECTIONS


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDED])
def test_rules_use_metrics_that_exist(rule: str) -> None:
    assert_metrics_exist((ALERTS | RECORDED)[rule]["expr"], rule)


def test_redis_exporter_exposes_the_metrics_of_the_rules(
    redis_server: RedisSettings, free_address: Callable[[], str]
) -> None:
    binary = shutil.which(EXPORTER)
    if binary is None:
        pytest.skip(f"{EXPORTER} is missing: apt-get install {EXPORTER}")
    address = free_address()

    def read_page() -> str:
        with contextlib.suppress(httpx.TransportError):
            page = httpx.get(f"http://{address}/metrics", timeout=WAIT_S).text
            return page if "redis_up 1" in page else ""
        return ""

    with subprocess.Popen([binary, f"-redis.addr={redis_server.url}", f"-web.listen-address={address}"]) as exporter:
        try:
            page = wait_until(read_page)
        finally:
            exporter.terminate()
    exposed = {line.split("{")[0].split()[0] for line in page.splitlines() if not line.startswith("#")}
    assert {name for name in EXPORTED if name.startswith("redis_")} <= exposed


def test_every_recorded_series_is_used_by_an_alert_or_a_dashboard() -> None:
    readers = [alert["expr"] for alert in ALERTS.values()]
    readers += [path.read_text() for path in (REPOSITORY / "deploy/grafana/dashboards").glob("*.json")]
    assert [name for name in RECORDED if not any(name in reader for reader in readers)] == []


def test_the_runbook_index_lists_every_alert_once() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == set(ALERTS)
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", (RUNBOOKS / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted((name, name, alert["labels"]["severity"]) for name, alert in ALERTS.items())


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_runbooks_name_settings_metrics_and_pages_that_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(
        r"`((?:trainer|rollout|reward|retriever|redis|data|run|model|networkPolicy|objectStore)\.[\w.]+)`", text
    ):
        assert is_setting(name) or is_value(name), f"neither a setting nor a value of the chart: {name}"
    for line in re.findall(r"^query: (.*)", text, re.M):
        assert_metrics_exist(line, page.stem)
    for name in re.findall(r"`(forage_[a-z0-9_]+)(?:\{[^`]*)?`", text):
        assert name in read_documented_series() or name + "_bucket" in read_documented_series(), name
    for line in re.findall(r"(?:^|`)forage ([^`\n#]+)", text, re.M):
        assert_is_command(line.split())


def assert_is_command(words: list[str]) -> None:
    """Assert that a `forage …` in a page is a command with these options."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"forage {name}"
        command = command.commands[name]
    if not command.context_settings.get("ignore_unknown_options"):  # forwarded to a service's own command
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("-")} <= known, words


def is_setting(name: str) -> bool:
    node: Any = Settings
    for part in name.split("."):
        if not (isinstance(node, type) and issubclass(node, BaseModel)):
            return False
        if part not in node.model_fields:
            return False
        node = node.model_fields[part].annotation
    return True


def is_value(name: str) -> bool:
    node: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


@pytest.mark.parametrize("version", HELMS)
def test_the_chart_installs_the_rules_unchanged(version: str) -> None:
    rendered = [item for item in render("every option on", version) if item["kind"] == "PrometheusRule"]
    installed = {item["metadata"]["name"].rpartition("-")[2]: item["spec"] for item in rendered}
    assert installed == {path.stem: yaml.safe_load(path.read_text()) for path in RULES.glob("*.yaml")}
    assert "{{ $value | humanizePercentage }}" in str(installed["trainer"]), (
        "Helm must leave templates of Prometheus alone"
    )


def test_the_chart_adds_a_prefix_to_runbook_urls() -> None:
    values = {"monitoring": {"rules": {"enabled": True, "runbooks": "https://wiki.example/forage/"}}}
    items = render_values(values)
    groups = [group for item in items if item["kind"] == "PrometheusRule" for group in item["spec"]["groups"]]
    urls = {rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert urls == {f"https://wiki.example/forage/docs/runbooks/{name}.md" for name in ALERTS}


def test_jobs_in_rules_exist_in_chart_and_compose() -> None:
    text = "".join(rule["expr"] for rule in [*ALERTS.values(), *RECORDED.values()])
    jobs_in_rules = {job for match in re.findall(r'job=~?"([^"]*)"', text) for job in match.split("|")}
    monitors = [item for item in render("every option on") if item["kind"] == "ServiceMonitor"]
    chart = {monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] for monitor in monitors}
    scraped = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert jobs_in_rules <= chart
    assert jobs_in_rules <= {job["job_name"] for job in scraped}


def test_labels_of_metrics_override_those_of_the_target() -> None:
    monitors = [item for item in render("every option on") if item["kind"] == "ServiceMonitor"]
    assert monitors
    # The operator adds the label `service`, which our metrics of circuits also have.
    assert all(endpoint["honorLabels"] for monitor in monitors for endpoint in monitor["spec"]["endpoints"])
