"""The whole stack, as a user runs it: train, Ctrl-C, look, ask, go on, report; and what training bought."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser_page import Page
from dashboard_queries import PanelQuery, list_queries, load_dashboards, substitute_variables
from demo import Demo
from otlp_receiver import Receiver, receive_grpc
from prometheus_scrape import EXPORTER, Prometheus
from service_ports import check_grpc_ports, check_pages
from traces import PARENTS, find_spans

from forage_records.step_file import read_step, step_file_path
from forage_records.trajectory_file import read_trajectories
from forage_runtime.settings import load_settings

pytest_plugins = ["browser_fixtures"]
STEPS = 8
EXPORTERS_PASSWORD = "redis/passwords/forage-exporter"
CLOSING = re.compile("</search>|</answer>")
FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


WITHOUT_DATA = {
    ("pipeline", "Alerts", "Alerts"): "none fires",
    ("retriever", "Shards", "{{shard}}"): "this retriever merges none",
    ("retriever", "Partial answers", "shard failures"): "likewise",
    ("retriever", "Reranking", "p50"): "no reranker is set",
    ("retriever", "Reranking", "p99"): "likewise",
    ("reward", "Judge model", "{{outcome}}"): "no reward has a judge",
    ("reward", "Shadow rewards", "scored"): "no shadow is set",
    ("reward", "Shadow rewards", "differ"): "likewise",
    ("reward", "Shadow rewards", "dropped"): "likewise",
    ("reward", "Restarts", "workers"): "it is one process",
    ("reward", "Restarts", "user rewards"): "there are none",
}
"""Queries (dashboard, panel, legend) that find nothing while a demo runs in health, and why."""


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]
) -> Iterator[Prometheus | None]:
    """None where it is not installed. It outlives the demo, whose metrics are read afterwards."""
    if not shutil.which("prometheus"):
        yield None
        return
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), free_address)
    yield prometheus
    prometheus.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receive_grpc() as receiver:
        yield receiver


def test_an_interrupted_demo_resumes_answers_questions_and_is_evaluated(
    small_demo: Callable[..., Demo],
    repository: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    receiver: Receiver,
    prometheus: Prometheus | None,
) -> None:
    traced = ("tracing.enabled=true", f"tracing.endpoint={receiver.endpoint}")
    demo = small_demo(STEPS, *traced, f"trainer.rollout_data_freq={STEPS}")
    demo.start("--seed", "1", "--base-port", str(demo.base_port))
    if prometheus is not None:
        demo.wait_for(lambda: (demo.run / EXPORTERS_PASSWORD).is_file())
        prometheus.scrape(demo.metrics, f"127.0.0.1:{demo.base_port}", demo.run / EXPORTERS_PASSWORD)
    demo.wait_for(lambda: demo.steps >= 3)
    settings = load_settings(demo.run / "settings.yaml", (), {})
    check_pages(settings, "trainer")
    demo.interrupt()
    assert demo.finish() == 130
    assert demo.list_leftovers() == [], "Ctrl-C left processes behind"

    done = demo.steps
    demo.start("--resume")
    demo.wait_for(lambda: demo.steps > done)
    port = ["--base-port", str(demo.base_port)]
    with demo.pause("trainer"):  # the last steps may take less time than the question
        asked = subprocess.run(
            [*FORAGE, "ask", "What is the capital of Mongolia?", *port], capture_output=True, text=True, timeout=120
        )
        check_pages(settings, "reward", "retriever", "rollout", "console")
        check_grpc_ports(settings)
    assert asked.returncode == 0, asked.stderr
    assert "no services are running" not in asked.stdout
    assert "What is the capital of Mongolia?" in asked.stdout
    assert "<think>" in asked.stdout

    assert demo.finish() == 0, demo.output[-3000:]
    summary = demo.summary
    assert summary["steps"] == STEPS
    assert summary["groups_issued"] == summary["groups_trained"] == STEPS * 4
    assert (summary["groups_lost"], summary["groups_duplicated"]) == (0, 0)
    assert summary["logprob_diff_mean"] < 1e-3, "the trainer and the engine see the same policy"
    assert 0 <= summary["em_before"] <= 1
    assert 0 <= summary["em_after"] <= 1
    steps = [json.loads(line)["step"] for line in (demo.run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)), "each step is reported once, though the run was interrupted"
    for label in ("before", "after"):
        rows = [json.loads(line) for line in (demo.run / "validation" / f"{label}.jsonl").read_text().splitlines()]
        turns = [span["text"] for row in rows for span in row["spans"] if span["role"] == "model"]
        closed = [turn for turn in turns if "</search>" in turn or "</answer>" in turn]
        assert closed, "the policy closes turns"
        assert all(CLOSING.search(turn).end() == len(turn) for turn in closed), "a turn ends at its first closing tag"
    for file in ("settings.yaml", "report.html", "curve.png", "validation/before.jsonl", "validation/after.jsonl"):
        assert (demo.run / file).stat().st_size > 0
    assert demo.list_leftovers() == []
    _check_traces(demo, receiver)

    out = tmp_path / "evaluation"
    questions = [str(repository / "data/world/test.parquet"), "--limit", "8"]
    policies = ["--policy", f"trained={demo.run}@latest", "--baselines", "all"]
    evaluated = subprocess.run(
        [*FORAGE, "eval", *questions, *policies, "--out", str(out), "--card", str(tmp_path / "card.json"), *port],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=repository,
    )
    assert evaluated.returncode == 0, evaluated.stderr
    results = json.loads((out / "results.json").read_text())
    measured = {(entry["policy"], entry["method"]): entry for entry in results["results"]}
    assert len(measured) == 2 * 4
    assert {(entry["questions"], entry["failed_samples"]) for entry in measured.values()} == {(8, 0)}
    epochs = [
        {
            segment.epoch
            for file in out.glob(f"trajectories/{label}-*")
            for t in read_trajectories(file)
            for segment in t.segments
        }
        for label in ("trained", "untrained")
    ]
    assert [len(label_epochs) for label_epochs in epochs] == [1, 1], "none was sampled in part by the other"
    assert epochs[0] != epochs[1]
    log = (demo.runs / "eval" / "logs" / "rollout.log").read_text()
    assert log.count('"event": "ray_started"') == 1, "one engine served both"
    # The same questions that the demo asked before and after, greedily: the same answers.
    assert measured["untrained", "search"]["em"]["mean"] == summary["em_before"]
    assert measured["trained", "search"]["em"]["mean"] == summary["em_after"]
    assert measured["trained", "rag"]["hit"] > 0
    assert measured["trained", "direct"]["searches"] == 0
    verified = subprocess.run(
        [*FORAGE, "eval", "--verify", str(tmp_path / "card.json"), *port],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=repository,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert verified.stdout.count("the same answers") == 2 * 4, "greedy answers are the same on one machine"
    compared = subprocess.run(
        [*FORAGE, "eval", "compare", f"{out}:untrained", f"{out}:trained"], capture_output=True, text=True, timeout=60
    )
    assert compared.returncode == 0, compared.stderr
    assert demo.list_leftovers() == []

    if shutil.which("chromium"):  # the pages' own tests say where it is missing
        page: Page = request.getfixturevalue("open_page")(out / "report.html")
        assert page.read_texts("h1") == ["Evaluation of trained, untrained"]
        assert len(page.run("return document.querySelectorAll('figure svg')")) == 2
        assert len(page.read_column("#answers", 0)) == 8


def _check_traces(demo: Demo, receiver: Receiver) -> None:
    """Check that the trace of every trajectory of the last step has the spans of all four services."""
    trajectories = [row.trajectory for row in read_step(step_file_path(demo.run, STEPS))]
    assert len(trajectories) == 4 * 4
    searched = 0
    for trace_id in {trajectory.trace_id for trajectory in trajectories}:
        spans = find_spans(receiver, trace_id)
        of_group = [trajectory for trajectory in trajectories if trajectory.trace_id == trace_id]
        searched += len(spans.get("rollout.respond", ()))
        optional = {"rollout.respond", "retriever.search", "POST /retrieve", "retriever.index"}
        assert set(PARENTS) - optional <= set(spans)
        assert {span.attributes["forage.trajectory"] for span in spans["rollout.sample"]} == {t.id for t in of_group}
        failed = {span.name for same_name in spans.values() for span in same_name if span.failed}
        assert failed <= {"rollout.sample"}, "nothing failed that the trajectories do not report"
        (train_span,) = spans["trainer.train"]
        assert train_span.attributes["forage.step"] == STEPS
        assert train_span.links, "it links to the step that consumed the group"
        step = next(
            span for span in receiver.named("trainer.step") if (span.trace_id, span.span_id) in train_span.links
        )
        assert step.attributes["forage.step"] == STEPS
        assert trace_id in {linked for linked, _ in step.links}, "and from there to all of its groups"
        phases = {span.name for span in receiver.spans if span.parent_id == step.span_id}
        assert {"trainer.wait", "trainer.update", "trainer.publish", "trainer.checkpoint"} <= phases
    assert searched
    searches = receiver.named("POST /retrieve")
    assert {span.service for span in searches} == {"forage-retriever"}


def test_every_panel_of_the_dashboards_has_data_of_the_demo(prometheus: Prometheus | None) -> None:
    if prometheus is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    if not prometheus.has_targets:
        pytest.skip("the demo of the test before this one was not run")
    every = {get_panel_key(query): query for name in load_dashboards() for query in list_queries(name)}
    assert set(WITHOUT_DATA) <= set(every), "an exception for a panel that does not exist"
    asked = {key: query for key, query in every.items() if key[0] != "redis" or shutil.which(EXPORTER)}
    empty = {key for key, query in asked.items() if not prometheus.has_data(_resolve_query(query))}
    assert empty <= set(WITHOUT_DATA)
    rules = [rule for group in prometheus.request("rules")["groups"] for rule in group["rules"]]
    assert rules
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


def get_panel_key(query: PanelQuery) -> tuple[str, str, str]:
    return query.dashboard, query.panel, query.legend


def _resolve_query(query: PanelQuery) -> str:
    """Substitute the variables; leave out the default for missing data."""
    return substitute_variables(query.expr, rate_interval="15s", time_range="5m").removesuffix(" or vector(0)")
