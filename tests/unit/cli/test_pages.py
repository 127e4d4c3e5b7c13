"""Pages: values are escaped, figures use the page's colours."""

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
from forage_records.spans import Mark

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


TEXT = ("ink", "quiet", "accent", "good", "bad", "warn", "info", "author-model", "author-env", "author-prompt")
BEHIND_INK = ("negative", "neutral", "positive", *(f"scale-{place}" for place in range(5)))
MARKS = tuple(f"series-{place}" for place in range(6))


def read_themes() -> dict[str, dict[str, str]]:
    """Name of a theme → its tokens."""
    css = Path(page.__file__).with_name("theme.css").read_text()
    blocks = re.findall(r"(:root[^{;]*)\{(.*?)\}", css, re.DOTALL)
    found = {selector.strip(): dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", body)) for selector, body in blocks}
    return {selector: tokens for selector, tokens in found.items() if tokens}


def compute_contrast(one: str, other: str) -> float:
    """WCAG 2's contrast of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_defines_every_colour_of_figures_in_light_and_dark() -> None:
    light, *others = read_themes().values()
    for colour, variable in figures.VARIABLES.items():
        name = variable.removeprefix("--")
        assert light[name] == colour, "the light page draws as the PNG does"
        assert all(name in theme for theme in others)


def test_a_chosen_theme_has_the_colours_of_the_readers() -> None:
    light, dark, chosen = read_themes().values()
    assert chosen == dark
    assert dark.keys() == light.keys()


def test_contrasts_suffice_in_every_theme() -> None:
    assert compute_contrast("#000000", "#ffffff") == pytest.approx(21)
    assert compute_contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    for theme, tokens in read_themes().items():
        grounds = [tokens[name] for name in ("paper", "card", "shade")]
        pairs = [(name, 4.5, [*grounds, tokens.get(f"{name}-shade", grounds[0])]) for name in TEXT]
        pairs += [(name, 3.0, grounds) for name in MARKS]
        pairs += [(name, 4.5, [tokens["ink"]]) for name in BEHIND_INK]
        for name, least, others in pairs:
            assert min(compute_contrast(tokens[name], other) for other in others) >= least, (theme, name)
