"""Summary, curve, report page, live view and ledger of a run's folder."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from rich.console import Console
from run_folders import write_run

from forage_cli.local.run_watch import ServiceStatus
from forage_cli.local.stack import Program
from forage_cli.local.training import live
from forage_cli.local.training.run import print_summary
from forage_cli.reports import run_report as report
from forage_cli.runs.ledger import GroupCounts
from forage_cli.terminal import trajectories as show
from forage_records.run_folder import RunFolder, estimate_time_left
from forage_runtime.settings import Settings


def build_trajectory(question: str, em: float, answer: str = "x") -> dict[str, object]:
    spans = [
        {"role": "prompt", "text": "the instruction"},
        {"role": "model", "text": f"<think>t</think> <answer> {answer} </answer>"},
    ]
    return {"question": question, "targets": ["right"], "em": em, "spans": spans}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    validations = {
        label: [build_trajectory("q1 <script>alert(1)</script>", em), build_trajectory("q2", 0.0)]
        for label, em in (("before", 0.0), ("after", 1.0))
    }
    steps = [
        {"step": i, "time": 100.0 + 2 * i, "em_mean": i / 4, "logprob_diff_mean": d, "reward_mean": 0.5}
        for i, d in ((1, 1e-6), (2, None), (3, 3e-6))
    ]
    run = write_run(tmp_path, validations, steps)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')
    return run


def test_the_summary_has_every_metric_of_a_run(run: RunFolder) -> None:
    summary = report.summarise(run, Settings(), GroupCounts(5, 5, 0, 0), {"trainer": 1, "redis": 2}, 3.456)
    assert summary["em_before"] == 0.0
    assert summary["em_after"] == summary["em_gain"] == 1.0
    assert summary["steps"] == 3, "a line that is still being written does not count"
    assert summary["restarts"] == 3
    assert summary["logprob_diff_mean"] == pytest.approx(2e-6), "steps without comparable tokens are left out"
    assert (summary["groups_issued"], summary["groups_lost"], summary["minutes"], summary["seed"]) == (5, 0, 3.46, 0)


def test_the_end_of_a_run_without_a_first_validation_is_printed(run: RunFolder) -> None:
    (run.path / "validation/before.json").unlink()
    summary = report.summarise(run, Settings(), GroupCounts(5, 5, 0, 0), {}, 3.0)
    console = Console(record=True, width=200)
    print_summary(run, summary, run.path / "report.html", console)
    assert "greedy test EM  – → 1.000" in console.export_text()


def test_the_page_is_self_contained_and_escapes_what_the_policy_wrote(run: RunFolder) -> None:
    summary = report.summarise(run, Settings(), GroupCounts(0, 0, 0, 0), {}, 1.0)
    text = report.write_report(run, summary).read_text()
    assert text.count("<script>") == 1, "the page's own"
    assert "&lt;script&gt;alert(1)" in text
    assert f'role="img" aria-label="{report.CURVE}"' in text
    assert not re.findall(r"https?:", text)
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run.path / "summary.json").read_text()) == summary


class Structure(HTMLParser):
    """The elements of a page with the names of their attributes, without the spans that mark parts of a text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, ...]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs if (tag, name) != ("path", "d")]  # a long legend leaves a curve no room
        if tag != "span" or not {"class", "data-within"}.issuperset(names):
            self.elements.append((tag, *names))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)//",
    "</style><style>*{display:none}</style>",
    "</title><h1>x</h1>",
    "<svg onload=alert(1)><a xlink:href='javascript:alert(1)'>x</a></svg>",
    '<img src=x onerror="alert(1)">',
    '" onmouseover="alert(1)" x="',
    "' autofocus onfocus='alert(1)",
    '"><a href="javascript:alert(1)">x</a>',
    "--><b>x</b><!--",
    "]]><b>x</b><![CDATA[",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&#60;b&#62;",
    "<details open ontoggle=alert(1)></details></main><form action=//x><input name=q>",
    "\x00<\x00script>\u2028alert(1)",
    "$\\frac{$ <b>$x$</b>",
]


def write_page(folder: Path, texts: Sequence[str]) -> Structure:
    """The page of a run with each of three texts in every place that holds one."""
    folder.mkdir()
    rows = []
    for text in texts:
        row = build_trajectory(f"q {text}", 0.0, text) | {"em": None, "reward": 1.0, "targets": [f"t {text}"]}
        rows.append(row | {"spans": [{"role": role, "text": f"w {text} w"} for role in ("prompt", "model", "env")]})
    parts = {f"reward/{text}": 0.5 for text in texts}
    steps = [{"step": n, "em_mean": None, "reward_mean": 1.0 * n, **parts, "reward/z": 0.5} for n in (1, 2)]
    run = write_run(folder, {"before": rows, "after": rows}, steps)
    summary = report.summarise(run, Settings(), GroupCounts(0, 0, 0, 0), {}, 1.0)
    return Structure(report.write_report(run, summary).read_text())


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Structure:
    return write_page(tmp_path_factory.mktemp("runs") / "harmless", ["one", "two", "three"])


@pytest.mark.parametrize("first", range(0, len(HOSTILE), report.EXAMPLES))
def test_no_text_adds_an_element_or_an_attribute_to_the_page(tmp_path: Path, harmless: Structure, first: int) -> None:
    texts = (HOSTILE * 2)[first : first + report.EXAMPLES]
    page = write_page(tmp_path / "hostile", texts)
    assert page.elements == harmless.elements
    shown = "".join(page.texts).replace("\ufffd", "\x00")
    for text in texts:
        assert shown.count(f"w {text} w") == 6, "the text is there, as text: three spans before, three after"
        assert f"of it {text}" in shown, "the curve's legend, in the SVG"


def test_examples_are_chosen_at_random_by_the_seed_and_are_the_same_before_and_after(tmp_path: Path) -> None:
    rows = [build_trajectory(f"q{number}", float(number > 15)) for number in range(20)]
    # Two that were asked at one end only: there is nothing to compare them with.
    run = write_run(tmp_path, {"before": [*rows, build_trajectory("once", 1.0)], "after": rows[::-1]}, [{"step": 1}])
    chosen = [
        [[row["question"] for row in report.select_examples(run, label, seed)] for label in ("before", "after")]
        for seed in range(40)
    ]
    assert all(before == after and len(set(before)) == report.EXAMPLES for before, after in chosen)
    assert chosen[0][0] == [row["question"] for row in report.select_examples(run, "after", 0)], "the seed decides"
    right = sum(name in ("q16", "q17", "q18", "q19") for before, _ in chosen for name in before)
    assert 10 <= right <= 40, "a fifth of the questions is right, and about a fifth of 120 examples"
    assert report.describe_examples(run, 7) == "3 of 20 held-out questions, chosen at random by the run's seed 7"
    summary = report.summarise(run, Settings(), GroupCounts(0, 0, 0, 0), {}, 1.0)
    assert "3 of 20 held-out questions, chosen at random by the run" in report.write_report(run, summary).read_text()
    console = Console(record=True, width=200)
    print_summary(run, summary, run.path / "report.html", console)
    assert "3 of 20 held-out questions, chosen at random by the run's seed 0" in console.export_text()


def read_lines(figure: Figure) -> dict[str, list[list[float]]]:
    """Label → values of a drawn line."""
    drawn = [line for axes in figure.axes for line in axes.get_lines()]
    found = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in drawn}
    pyplot.close(figure)
    return {label: points for label, points in found.items() if not label.startswith("_")}


def test_the_curve_draws_every_validation_and_names_who_was_asked(tmp_path: Path) -> None:
    steps = [{"step": n, "em_mean": None if n == 2 else 0.25 * n, "kl_ref": None} for n in (1, 2, 3, 4)]
    validations = {
        label: [build_trajectory("q", em)]
        for label, em in (("before", 0.0), ("step-2", 0.5), ("after", 1.0), ("watch-2", 0.75), ("step-10", 0.25))
    }
    run = write_run(tmp_path, validations, steps)
    assert run.list_validations() == ["before", "step-2", "step-10", "after", "watch-2"]
    figure = report.draw_curve(run)
    assert len(figure.axes) == 1, "no KL was computed"
    lines = read_lines(figure)
    assert set(lines) == {"EM, sampled (training questions)", "EM, greedy (held-out questions)"}
    assert lines["EM, greedy (held-out questions)"] == [[0, 0.0], [2, 0.5], [4, 1.0], [10, 0.25]], "not the watched one"
    sampled = [y for _, y in lines["EM, sampled (training questions)"]]
    assert math.isnan(sampled[1]), "unknown is a gap, not 0"
    assert sampled[2] == pytest.approx(0.8 * 0.25 + 0.2 * 0.75)
    text = report.write_report(run, report.summarise(run, Settings(), GroupCounts(0, 0, 0, 0), {}, 1.0)).read_text()
    assert "for every validation" in text
    assert "KL divergence" not in text


def test_rewards_of_ones_own_are_drawn_where_there_is_no_exact_match(tmp_path: Path) -> None:
    steps = [
        {"step": n, "em_mean": None, "reward_mean": -2.0 * n, "reward/length": -3.0 * n, "reward/style": 1.0 * n,
         "kl_ref": 0.1}
        for n in (1, 2)
    ]  # fmt: skip
    unjudged = build_trajectory("q", 0.0) | {"em": None, "reward": 3.0}
    run = write_run(tmp_path, {"before": [unjudged], "after": [unjudged]}, steps)
    lines = read_lines(report.draw_curve(run))
    assert set(lines) == {"mean reward, sampled (training questions)", "of it length", "of it style"}
    assert [y for _, y in lines["mean reward, sampled (training questions)"]] == pytest.approx([-2.0, -2.4])
    summary = report.summarise(run, Settings(), GroupCounts(0, 0, 0, 0), {}, 1.0)
    assert summary["em_gain"] is None
    text = report.write_report(run, summary).read_text()
    assert "The exact match of sampled answers is not known in this run." in text
    assert text.count(">not judged<") == 2
    assert ">wrong<" not in text
    assert "KL divergence" in text


def test_a_run_without_steps_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path, {}, [])
    summary = report.summarise(run, Settings(), GroupCounts(0, 0, 0, 0), {}, 1.0)
    assert "0 optimizer steps" in report.write_report(run, summary).read_text()


def test_the_live_view_shows_progress_restarts_and_time_left(run: RunFolder) -> None:
    view = live.LiveView(run, 10, 0.0, "http://127.0.0.1:18650")
    began = time.monotonic() - 65
    view.statuses = {
        Program.REDIS: ServiceStatus("ready", "", began),
        Program.ROLLOUT: ServiceStatus("not ready", "engine: it is\nstarting", began),
        Program.TRAINER: ServiceStatus("restarting", "", began, restarts=2),
    }
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view)
    text = console.export_text()
    assert "step 3/10" in text
    assert "console  http://127.0.0.1:18650" in text
    assert re.search(r"● redis +ready · for 1 min \d\d s", text)
    assert re.search(r"○ rollout +not ready: engine: it is starting · for 1 min", text)
    assert re.search(r"✗ trainer +restarting · for 1 min \d\d s · restarted 2 times", text)
    assert "left 54 s" in text, "7 steps at 2 s and the validation that follows"


def test_the_live_view_of_a_run_without_exact_match_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"before": [build_trajectory("q", 0.0) | {"em": None}]}, [{"step": 1, "em_mean": None}])
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(live.LiveView(run, 10, 0.0))
    text = console.export_text()
    assert re.search(r"EM of sampled answers +–", text)
    assert "greedy test EM" not in text


def test_no_time_left_is_estimated_before_the_third_step(run: RunFolder) -> None:
    assert estimate_time_left(run.read_steps()[:2], 10, "training") is None
    assert live.format_duration(None) == "…"
    assert live.format_duration(245) == "4 min 05 s"


def test_the_sparkline_spans_its_range_and_has_a_limited_width() -> None:
    assert live.draw_sparkline([0.0, 1.0, 2.0, -1.0]) == "▁██▁"
    assert len(live.draw_sparkline([0.5] * 1000, 60)) == 60
    assert live.draw_sparkline([0.0, None, 1.0]) == "▁ █"
    assert live.draw_sparkline([None, None, 0.0, None], 2) == " ▁"


def test_printed_trajectories_show_the_author_of_each_text(run: RunFolder) -> None:
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show.render_panel(run.read_trajectories("after")[0]))
    text = console.export_text()
    assert "<answer> x </answer>" in text
    assert "accepted: right" in text
    assert "the instruction" not in text
