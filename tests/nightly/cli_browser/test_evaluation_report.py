"""The pages of an evaluation and of a comparison, opened in a real browser."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from browser_page import Page
from evaluation_services import Scripted, serve, write_questions
from typer.testing import CliRunner

from forage_cli.main import app
from forage_proto.v1.trajectory_pb2 import Prompt

CHANCE = {"": 0.9, "single_turn": 0.2}


def answer_question(prompt: Prompt, sample: int) -> str:
    drawn = random.Random(f"{prompt.group_uid} {sample}").random()
    return prompt.ground_truth.targets[0] if drawn < CHANCE[prompt.environment] else "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]) -> Path:
    """Two sets of the paper, four methods, four samples; and RAG compared with searching."""
    out = tmp_path_factory.mktemp("evaluation")
    files = [str(write_questions(out / f"{source}.parquet", source)) for source in ("nq", "popqa")]
    with serve(Scripted(says=answer_question), free_address) as settings:
        run_forage(
            *("eval", *files, *settings, "--policy", "running", "--out", str(out)),
            *("--baselines", "direct,cot,rag", "--samples", "4"),
        )
    run_forage("eval", "compare", f"{out}:running/rag", str(out))
    return out


def run_forage(*arguments: str) -> None:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("width", "dark"), [(1200, True), (390, False)])
def test_the_report_has_its_plots_and_tables(
    open_page: Callable[..., Page], folder: Path, width: int, dark: bool
) -> None:
    page = open_page(folder / "report.html", width, dark)
    assert page.read_texts("h1") == ["Evaluation of running"]
    plots = page.run("return [...document.querySelectorAll('figure svg')].map(svg => svg.ariaLabel)")
    assert [label.partition(" ")[0] for label in plots] == ["Exact", "Exact", "pass@k"]
    assert page.read_column("#answers", 1)[::3] == ["search", "direct answer", "chain of thought", "one-shot RAG"]
    assert page.read_column("#answers", 2)[:3] == ["nq", "popqa", "all"]
    assert "one-shot RAG" in page.read_column("#ways", 1)
    captions = page.read_texts("caption")
    assert any(caption.startswith("Exact match; †") for caption in captions)
    assert "Over k samples" in captions


def test_rows_sort_and_questions_unfold(open_page: Callable[..., Page], folder: Path) -> None:
    page = open_page(folder / "report.html")
    page.click("#answers thead th:nth-child(6) button")
    em = [float(text) for text in page.read_column("#answers", 5)]
    assert em == sorted(em)
    assert len(page.read_texts("#questions > details")) == 10
    assert len(page.read_texts("#questions > details[open] section")) == 4, "one is open, with every method"
    page.click("[data-fold='#questions > details'][data-open]")
    assert len(page.read_texts("#questions .trajectory")) == 40
    assert page.run("return document.querySelector('#questions').textContent.includes('<script>alert')")


def test_a_comparison_shows_both_sides(open_page: Callable[..., Page], folder: Path) -> None:
    page = open_page(folder / "comparison.html")
    assert page.read_texts("h1") == ["running search against running rag"]
    assert page.read_texts(".tiles dt") == ["EM of A", "EM of B", "B − A", "p"]
    won = page.read_texts("#won > details")
    assert len(won) == int(page.read_column("table", 8)[-1]) > 0
    assert len(page.read_texts("#won > details[open] .trajectory")) == 2
