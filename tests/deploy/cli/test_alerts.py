"""Alert rules: Prometheus accepts them, every alert is tried both ways and explained, and reads metrics that exist."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deployment_tools import HELMS, REPOSITORY
from helm_chart import CHART, containers, one, pods, rendered, template
from prometheus_scrape import EXPORTER
from pydantic import BaseModel
from typer.main import get_command

from forage_cli.main import app
from forage_common.settings import RedisSettings, Settings

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
"""What Prometheus, its client and redis_exporter give: metric → labels."""

TARGET_LABELS = {"namespace", "job", "instance"}
_METRIC = re.compile(r"\b(?:forage|redis|process)_[a-z0-9_]+|\bup\b")
_RECORDED = re.compile(r"\b[a-z]+:[a-z0-9_]+:[a-z0-9]+")
_SELECTOR = re.compile(r"\b([a-z_:0-9]+)\{([^}]*)\}")
_PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(_PROMTOOL is None, reason="no promtool here: apt-get install prometheus")

Rule = dict[str, Any]


def promtool(*arguments: str | Path) -> str:
    """What it says. Fails the test if it is not content."""
    done = subprocess.run([str(_PROMTOOL), *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def rules() -> dict[Path, list[Rule]]:
    found = {path: yaml.safe_load(path.read_text())["groups"] for path in sorted(RULES.glob("*.yaml"))}
    return {path: [rule for group in groups for rule in group["rules"]] for path, groups in found.items()}


ALERTS = {rule["alert"]: rule for each in rules().values() for rule in each if "alert" in rule}
RECORDED = {rule["record"]: rule for each in rules().values() for rule in each if "record" in rule}


def cases() -> Iterator[dict[str, Any]]:
    for path in sorted(TESTS.glob("*.yaml")):
        yield from yaml.safe_load(path.read_text())["tests"]


@functools.cache
def documented() -> dict[str, set[str]]:
    """Series → its labels, from docs/reference/metrics.md, which is made from the code and tested to be current."""
    series: dict[str, set[str]] = {}
    for line in (REPOSITORY / "docs/reference/metrics.md").read_text().splitlines():
        if row := re.match(r"\| `(forage_[a-z0-9_]+)` \| ([a-z]+) \| ([^|]*)\|", line):
            name, kind, labels = row[1], row[2], set(re.findall(r"`(\w+)`", row[3]))
            if kind == "histogram":
                series |= {name + "_bucket": labels | {"le"}, name + "_sum": labels, name + "_count": labels}
            else:
                series[name] = labels
    assert len(series) > 50, "the table of docs/reference/metrics.md is not what this test takes it for"
    return series | EXPORTED


def assert_readable(expression: str, where: str) -> None:
    """Every metric of an expression or a series exists, and so does every label it is chosen by."""
    known = documented() | {name: set() for name in RECORDED}
    names = set(_RECORDED.findall(expression)) | set(_METRIC.findall(_RECORDED.sub("", expression)))
    assert names, f"{where} reads nothing"
    assert names <= known.keys(), f"{where} reads what nobody shows: {sorted(names - known.keys())}"
    for name, inside in _SELECTOR.findall(expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))
        unknown = labels - known[name] - TARGET_LABELS
        assert not unknown, f"{where}: {name} has no label {sorted(unknown)}"


@needs_promtool
def test_prometheus_accepts_the_rules() -> None:
    assert "FAILED" not in promtool("check", "rules", *rules())


@needs_promtool
@pytest.mark.parametrize("path", sorted(TESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    promtool("test", "rules", path)


@needs_promtool
def test_a_rule_that_is_never_true_fails_its_unit_tests(tmp_path: Path) -> None:
    shutil.copytree(RULES.parent, tmp_path / "prometheus")
    broken = tmp_path / "prometheus/rules/retriever.yaml"
    broken.write_text(broken.read_text().replace("request_seconds:p99 > 1", "request_seconds:p99 > 1000"))
    test = tmp_path / "prometheus/tests/retriever.yaml"
    done = subprocess.run([str(_PROMTOOL), "test", "rules", str(test)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "ForageRetrieverSlow" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    fires, quiet = [], []
    for case in cases():
        asked = [one for one in case["alert_rule_test"] if one["alertname"] == name]
        if asked:
            (fires if any(one.get("exp_alerts") for one in asked) else quiet).append(case["name"])
    assert fires, "no case in which it fires"
    assert quiet, "no healthy neighbour"


def test_unit_tests_feed_series_that_services_show() -> None:
    for case in cases():
        for series in case["input_series"]:
            assert_readable(series["series"], case["name"])


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert "for" in alert
    assert alert["labels"]["severity"] in SEVERITIES
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
    lines = (RUNBOOKS / f"{name}.md").read_text().splitlines()
    assert lines[0] == f"# {name}"
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == SECTIONS


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDED])
def test_rules_read_what_services_show(rule: str) -> None:
    assert_readable((ALERTS | RECORDED)[rule]["expr"], rule)


def test_the_exporter_of_redis_says_what_rules_read(
    redis_server: RedisSettings, free_address: Callable[[], str]
) -> None:
    binary = shutil.which(EXPORTER)
    if binary is None:
        pytest.skip(f"no {EXPORTER} here: apt-get install {EXPORTER}")
    address = free_address()
    with subprocess.Popen([binary, f"-redis.addr={redis_server.url}", f"-web.listen-address={address}"]) as exporter:
        try:
            page, deadline = "", time.monotonic() + 20
            while "redis_up 1" not in page and time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    page = httpx.get(f"http://{address}/metrics").text
                time.sleep(0.1)
        finally:
            exporter.terminate()
    shown = {line.split("{")[0].split()[0] for line in page.splitlines() if not line.startswith("#")}
    assert {name for name in EXPORTED if name.startswith("redis_")} <= shown


def test_every_recorded_series_is_read_by_an_alert_or_a_dashboard() -> None:
    readers = [alert["expr"] for alert in ALERTS.values()]
    readers += [path.read_text() for path in (REPOSITORY / "deploy/grafana/dashboards").glob("*.json")]
    assert [name for name in RECORDED if not any(name in reader for reader in readers)] == []


def test_the_index_of_runbooks_lists_every_alert_once() -> None:
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
        assert_readable(line, page.stem)
    for name in re.findall(r"`(forage_[a-z0-9_]+)(?:\{[^`]*)?`", text):
        assert name in documented() or name + "_bucket" in documented(), name
    for line in re.findall(r"(?:^|`)forage ([^`\n#]+)", text, re.M):
        assert_is_command(line.split())


def assert_is_command(words: list[str]) -> None:
    """A `forage …` of a page is one that the command knows, with options that it has."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"forage {name}"
        command = command.commands[name]
    if not command.context_settings.get("ignore_unknown_options"):  # passed on to a service's own command
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
def test_the_chart_installs_the_rules_as_they_are(version: str) -> None:
    found = [thing for thing in rendered("every option on", version) if thing["kind"] == "PrometheusRule"]
    given = {thing["metadata"]["name"].rpartition("-")[2]: thing["spec"] for thing in found}
    assert given == {path.stem: yaml.safe_load(path.read_text()) for path in RULES.glob("*.yaml")}
    assert "{{ $value | humanizePercentage }}" in str(given["trainer"]), "Prometheus fills it in, not Helm"


def test_the_chart_puts_a_place_before_runbooks() -> None:
    values = {"monitoring": {"rules": {"enabled": True, "runbooks": "https://wiki.example/forage/"}}}
    done = template(values)
    assert done.returncode == 0, done.stderr
    things = [thing for thing in yaml.load_all(done.stdout, yaml.CSafeLoader) if thing]
    groups = [group for thing in things if thing["kind"] == "PrometheusRule" for group in thing["spec"]["groups"]]
    urls = {rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert urls == {f"https://wiki.example/forage/docs/runbooks/{name}.md" for name in ALERTS}


def test_jobs_are_named_as_the_chart_and_compose_name_them() -> None:
    text = "".join(rule["expr"] for rule in [*ALERTS.values(), *RECORDED.values()])
    named = {job for match in re.findall(r'job=~?"([^"]*)"', text) for job in match.split("|")}
    monitors = [thing for thing in rendered("every option on") if thing["kind"] == "ServiceMonitor"]
    chart = {one["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] for one in monitors}
    scraped = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert named <= chart
    assert named <= {job["job_name"] for job in scraped}


def test_labels_of_metrics_win_over_those_of_the_target() -> None:
    monitors = [thing for thing in rendered("every option on") if thing["kind"] == "ServiceMonitor"]
    assert monitors
    # The operator labels every target with its `service`, and so do we the service that a circuit belongs to.
    assert all(endpoint["honorLabels"] for one in monitors for endpoint in one["spec"]["endpoints"])


def test_redis_has_a_limit_below_that_of_its_container() -> None:
    """Without one the alert of its memory is silent, and the kernel speaks first."""
    composed = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]["redis"]
    assert mebibytes(re.findall(r"--maxmemory (\S+)", composed["command"][-1])[0]) < 0.9 * mebibytes(
        composed["deploy"]["resources"]["limits"]["memory"]
    )
    [(_, pod)] = pods(one(rendered("defaults"), "StatefulSet", "-redis"))
    [container, *_] = [container for container, first in containers(pod["spec"]) if not first]
    limit = container["args"][container["args"].index("--maxmemory") + 1]
    assert mebibytes(limit) < 0.9 * mebibytes(container["resources"]["limits"]["memory"])


def mebibytes(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]+)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"m": 1, "g": 1024}[unit.lower()[0]]
