"""The page of a probe, opened in a real browser."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from browser_page import Page
from completions_server import encode, write_character_model

from forage_cli.probe import report
from forage_probe.metrics import summarise_probes
from forage_proto.v1.probe_pb2 import AnswerCount, Probed, ProbePoint
from forage_proto.v1.trajectory_pb2 import GroundTruth, Role, Span, Status, Trajectory
from forage_runtime.settings import load_settings

PLAN = {"points": 10, "samples": 50}
PROMPT = "Answer the given question.\nQuestion: what is the capital of Norway?\n"
THOUGHT = "Norway lies in the north. Its parliament sits in Oslo, and so does its king: <b>so it</b> is the capital."
COUNT = 24


def build_trajectory(number: int) -> Trajectory:
    parts = [
        (Role.ROLE_PROMPT, PROMPT),
        (Role.ROLE_MODEL, f"<think>{THOUGHT}</think>\n<answer> Oslo </answer>"),
    ]
    one = Trajectory(id=f"run/{number}", status=Status.STATUS_OK, ground_truth=GroundTruth(targets=["Oslo"]))
    for role, text in parts:
        begin = len(one.token_ids)
        one.token_ids.extend(encode(text))
        one.spans.append(Span(role=role, begin=begin, end=len(one.token_ids), text=text))
    return one


def build_probed(number: int) -> Probed:
    chance, begin = random.Random(number), len(PROMPT + "<think>")
    points = []
    for place in range(11):
        share = 0.1 + 0.8 * place / 10 if number % 3 else 0.3
        correct = sum(chance.random() < share for _ in range(50))
        answers = [AnswerCount(answer="oslo", count=correct), AnswerCount(answer="bergen", count=50 - correct)]
        kept = round(len(THOUGHT) * place / 10)
        points.append(ProbePoint(kept=kept, samples=50, correct=correct, answers=answers, generated_tokens=400))
    return Probed(
        trajectory_id=f"run/{number}",
        turn=1,
        status=Status.STATUS_OK,
        cot_begin=begin,
        cot_end=begin + len(THOUGHT),
        points=points,
        correct=number % 3 > 0,
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    settings = load_settings(None, [f"model.path={write_character_model(folder / 'model')}"])
    probes = [build_probed(number) for number in range(COUNT)]
    probes.append(Probed(trajectory_id="run/lost", turn=1, status=Status.STATUS_INVALID_INPUT, status_detail="it hung"))
    page = report.render_page(summarise_probes(PLAN, probes), probes, map(build_trajectory, range(COUNT)), settings)
    (folder / "report.html").write_text(page, encoding="utf-8")
    return folder / "report.html"


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_the_page_shows_the_curve_the_set_and_the_marks(
    open_page: Callable[..., Page], file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    page = open_page(file, width, dark)
    assert page.read_texts("h1") == ["Faithfulness probe"]
    assert page.read_texts(".tiles dd")[0] == str(COUNT + 1)
    labels = page.run("return [...document.querySelectorAll('figure svg')].map(svg => svg.ariaLabel)")
    assert len(labels) == 2
    assert {"correct (16)", "incorrect (8)", "all (24)"} <= set(page.read_texts("figure svg text"))
    marks = page.read_texts("#thoughts mark")  # only the first is unfolded
    assert len(marks) == 11
    assert all(0 <= float(mark) <= 1 for mark in marks)
    assert "of 50 right" in str(page.run("return document.querySelector('#thoughts mark').title"))
    said = "".join(page.read_texts("#thoughts details[open] .span.model"))
    assert "<b>" in said
    page.write_screenshot(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 20_000


def test_probes_can_be_sorted_filtered_and_unfolded(open_page: Callable[..., Page], file: Path) -> None:
    page = open_page(file)
    page.click("#probes th:nth-child(6) button")
    found = [float(value) for value in page.read_column("#probes", 5)]
    assert found in (sorted(found), sorted(found, reverse=True))
    assert len(found) == COUNT
    page.click(".folds button")
    assert len(page.read_texts("#thoughts mark")) == 11 * COUNT
    assert page.read_column("main table:last-of-type", 2)[-1] == "it hung"
