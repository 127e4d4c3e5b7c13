"""Pages: values are escaped, figures use the page's colours, trajectories are split at tags and marks."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from matplotlib import pyplot
from matplotlib.figure import Figure

from forage_cli.reports import figures, page
from forage_cli.reports.spans import Block, Mark, split_spans
from forage_common.v1.trajectory_pb2 import Role, Span

TEMPLATE = """{% extends "base.html" %}
{% from "parts.html" import table, tiles %}
{% from "trajectory.html" import trajectory %}
{% block title %}{{ name }}{% endblock %}
{% block content %}
{{ tiles([(0.5, "half")]) }}{{ table("rows", ["a", "b"], [["x", 1e-5], [name, none]], id="t") }}
{{ trajectory(spans, marks) }}
{% endblock %}
"""
SPANS = [
    {"role": "prompt", "text": "ask"},
    {"role": "model", "text": "<think> a & b </think>\n<answer> c </answer>"},
    {"role": "env", "text": "\n\n<information>d</information>\n\n"},
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report_of_a_test").mkdir()
    (folder / "report_of_a_test" / "__init__.py").touch()
    (folder / "report_of_a_test" / "own.html").write_text(TEMPLATE)
    sys.path.append(str(folder))
    return "report_of_a_test"


def render_package(package: str, **changes: object) -> str:
    values = {"name": '<img src=x onerror="y">', "spans": SPANS, "marks": [Mark(13, "50%", "half & half", 0.5)]}
    return page.render("own.html", package, **values | changes)


def test_values_of_a_page_are_escaped(package: str) -> None:
    text = render_package(package)
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=&#34;y&#34;&gt;") == 3, "in title, heading and table"
    assert "<dt>half</dt><dd>0.500</dd>" in text
    assert 'data-value="1e-05">1.0e-05</td>' in text
    assert '<td class="number">–</td>' in text
    assert '<th scope="col" class="number"><button type="button">b</button></th>' in text
    assert '<th scope="col"><button type="button">a</button></th>' in text


def test_only_the_pages_own_script_may_run(package: str) -> None:
    text = render_package(package)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy


def test_a_missing_value_of_a_template_is_an_error(package: str) -> None:
    with pytest.raises(UndefinedError, match="'name' is undefined"):
        page.render("own.html", package, spans=[], marks=[])


def test_a_trajectory_keeps_its_text_and_drops_newlines_at_the_ends_of_spans(package: str) -> None:
    text = render_package(package)
    assert '<details class="prompt"><summary>prompt</summary><span>ask</span></details>' in text
    assert '<mark title="half &amp; half" style="--strength:50.0%">50%</mark>' in text
    assert '<div class="span env"><span class="tag">&lt;information&gt;</span>' in text
    assert '<span data-within="answer"> c </span>' in text


def read_block(block: Block) -> list[str]:
    return [f"[{piece.mark.label}]" if piece.mark else f"{piece.within}:{piece.text}" for piece in block.pieces]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([], ["think:<think>", "think:abc", "think:</think>", ":x"]),
        ([8], ["think:<think>", "think:a", "[8]", "think:bc", "think:</think>", ":x"]),
        ([10, 7, 10], ["think:<think>", "[7]", "think:abc", "[10]", "[10]", "think:</think>", ":x"]),
        ([0, 3], ["[0]", "[3]", "think:<think>", "think:abc", "think:</think>", ":x"]),
        ([-5, 19, 99], ["[-5]", "think:<think>", "think:abc", "think:</think>", ":x", "[19]", "[99]"]),
        ([18], ["think:<think>", "think:abc", "think:</think>", "[18]", ":x"]),
    ],
)
def test_marks_split_the_text_at_their_positions(marks: list[int], expected: list[str]) -> None:
    (block,) = split_spans([{"role": "model", "text": "<think>abc</think>x"}], [Mark(at, str(at)) for at in marks])
    assert read_block(block) == expected


def test_marks_count_over_all_spans_and_spans_may_be_messages() -> None:
    spans = [Span(role=Role.ROLE_PROMPT, text="ab"), Span(role=Role.ROLE_ENV, text="cd")]
    one, other = split_spans(spans, [Mark(2, "edge"), Mark(3, "in")])
    assert (one.role, other.role) == ("prompt", "env")
    assert (read_block(one), read_block(other)) == ([":ab", "[edge]"], [":c", "[in]", ":d"])


@figures.apply_style()
def draw(color: str) -> Figure:
    figure, axes = pyplot.subplots(figsize=(4, 3))
    axes.plot([0, 1], [0, 1], "o", color=color, clip_on=True)
    return figure


def test_figures_use_the_colours_of_the_page_and_share_no_ids() -> None:
    one, other = figures.render_svg(draw(figures.RED), "a < b"), figures.render_svg(draw("#123456"), "another")
    assert 'role="img" aria-label="a &lt; b"' in one
    assert "var(--series-4)" in one
    assert "var(--ink)" not in one, "nothing was drawn in it"
    assert "#123456" in other, "a colour of one's own stays"
    assert "http" not in one
    ids = [re.findall(r'\bid="([^"]+)"', text) for text in (one, other)]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])
    for text, own in zip((one, other), ids, strict=True):
        assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)), "markers and clips are referred to"
        assert {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)} <= set(own)


def test_the_page_defines_every_colour_of_figures_in_light_and_dark() -> None:
    css = Path(page.__file__).with_name("page.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")[:2]
    for colour, variable in figures.VARIABLES.items():
        assert f"{variable}: {colour};" in light, "the light page draws as the PNG does"
        assert re.search(rf"{variable}: #[0-9a-f]{{6}};", dark)
