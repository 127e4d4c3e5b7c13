"""The report of a run, opened in a real browser."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser_page import Page
from run_folders import write_run

from forage_cli.reports import run_report as report
from forage_cli.runs.ledger import GroupCounts
from forage_runtime.settings import Settings

ANSWERS = {
    "What is the capital of Mongolia?": "Ulan Bator",
    "Which currency has Peru?": "Sol",
    "Where is Chad?": "Africa",
}
ATTACK = "<img src=x onerror='window.attacked = 1'><script>window.attacked = 1</script>"


def build_trajectory(question: str, target: str, searched: bool) -> dict[str, object]:
    said = target if searched else "Paris"
    spans = [{"role": "prompt", "text": f"Answer the given question.\nQuestion: {question}\n"}]
    if searched:
        passages = "\n".join(f"Doc {n}(Title: {question}) {target} {ATTACK} {'word ' * 60}" for n in (1, 2, 3))
        spans += [
            {"role": "model", "text": f"<think> I look it up. </think>\n<search> {question} </search>"},
            {"role": "env", "text": f"\n\n<information>{passages}\n</information>\n\n"},
        ]
    spans.append({"role": "model", "text": f"<think> I know. </think>\n<answer> {said} </answer>"})
    return {"question": question, "targets": [target], "em": float(searched), "reward": float(searched), "spans": spans}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    validations = {
        label: [build_trajectory(question, target, searched) for question, target in ANSWERS.items()]
        for label, searched in (("before", False), ("after", True))
    }
    steps = []
    for step in range(1, 121):
        learnt = 1 / (1 + math.exp(-(step - 50) / 12)) + 0.03 * math.sin(step * 2.4)
        steps.append({"step": step, "em_mean": 0.9 * learnt, "search_rate": learnt, "format_rate": 1, "kl_ref": learnt})
    run = write_run(tmp_path_factory.mktemp("run"), validations, steps)
    return report.write_report(run, report.summarise(run, Settings(), GroupCounts(480, 480, 0, 0), {"trainer": 1}, 6.5))


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_the_report_has_its_plots_and_fits_the_window(
    open_page: Callable[..., Page], file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    page = open_page(file, width, dark)
    assert page.read_texts("h1") == ["Run local"]
    assert page.read_texts(".tiles dd") == ["0.000", "1.000", "120", "6.5", "0", "0"]
    assert page.run("return document.querySelector('figure svg').ariaLabel") == report.CURVE
    assert "optimizer step" in page.read_texts("figure svg text")
    assert page.read_style("body", "background-color") == ("rgb(20, 23, 26)" if dark else "rgb(250, 249, 246)")
    assert page.read_style("figure svg text", "fill") == page.read_style("figcaption", "color"), (
        "figures follow the page"
    )
    page.write_screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000


def test_the_policys_text_is_escaped(open_page: Callable[..., Page], file: Path) -> None:
    page = open_page(file)
    assert any(ATTACK in text for text in page.read_texts(".span.env"))
    assert page.run("return window.attacked ?? null") is None
    page.run("document.body.insertAdjacentHTML('beforeend', \"<img src='data:,' onerror='window.attacked = 1'>\")")
    assert any("Content Security Policy" in flaw for flaw in page.list_flaws()), "it could not run if it were markup"
    assert page.run("return window.attacked ?? null") is None


def test_trajectories_are_side_by_side_and_can_be_folded(open_page: Callable[..., Page], file: Path) -> None:
    page = open_page(file)
    assert page.read_texts("#questions .fold:first-child .verdict") == ["wrong", "right"]
    sides = "document.querySelectorAll('#questions .fold:first-child section')"
    left, right = page.run(f"return [...{sides}].map(side => side.getBoundingClientRect().x)")
    assert left < right
    page.click("button[data-fold]:not([data-open])")
    assert page.read_texts("#questions .trajectory") == []
    page.click("#questions summary")
    assert len(page.read_texts("#questions .trajectory")) == 2
    page.click("button[data-fold][data-open]")
    assert len(page.read_texts("#questions .trajectory")) == 6


def test_questions_are_filtered_by_every_word(open_page: Callable[..., Page], file: Path) -> None:
    page = open_page(file)
    field = "input[data-filter^='#questions']"
    page.type(field, "PERU sol")
    assert [text.split(" accepted")[0] for text in page.read_texts("#questions > details > summary")] == [
        "Which currency has Peru?"
    ]
    assert page.read_texts(".filter output") == ["1 of 3"]
    page.type(field, "nowhere")
    assert page.read_texts("#questions > details") == []
    page.run("const f = document.querySelector('input'); f.value = ''; f.dispatchEvent(new Event('input'))")
    assert len(page.read_texts("#questions > details")) == 3


def test_the_table_sorts_by_the_column_that_is_clicked(open_page: Callable[..., Page], file: Path) -> None:
    page = open_page(file)
    names = page.read_column("#metrics", 0)
    assert names[0] == "run"
    page.click("#metrics th:first-child button")
    assert page.read_column("#metrics", 0) == sorted(names)
    page.click("#metrics th:first-child button")
    assert page.read_column("#metrics", 0) == sorted(names, reverse=True)
    assert page.run("return document.querySelector('#metrics th').ariaSort") == "descending"
    page.click("#metrics th:last-child button")
    values = page.read_column("#metrics", 1)
    numbers = [float(value) for value in values if re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value)]
    assert len(numbers) > 5
    assert numbers == sorted(numbers)
    assert values[-1] == "–", "what has no value stays last"
    page.type("input[data-filter^='#metrics']", "em_")
    assert set(page.read_column("#metrics", 0)) == {"em_before", "em_after", "em_gain"}
