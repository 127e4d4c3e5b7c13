"""Matplotlib figures in one style, as inline SVG in the page's light or dark colours."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, QUIET, LINE = "#20262e", "#5c6570", "#dedbd3"
GREEN, BLUE, AMBER, PURPLE, RED, TEAL = SERIES = ("#2f8f5b", "#3b78c4", "#bb7212", "#8a5fb5", "#c2504a", "#2f9393")
# These colours become the page's CSS variables, so that they follow its theme; any other colour stays.
VARIABLES = {INK: "--ink", QUIET: "--quiet", LINE: "--line"} | {
    colour: f"--series-{place}" for place, colour in enumerate(SERIES)
}


@contextmanager
def apply_style() -> Iterator[None]:
    """Apply the style to figures drawn in the block; also a decorator of the function that draws.

    Example:
        @figures.apply_style()
        def draw() -> Figure:
            figure, axes = pyplot.subplots(figsize=(9, 4))
    """
    import matplotlib
    from matplotlib import rcsetup

    matplotlib.use("Agg")
    with matplotlib.rc_context(
        {
            "figure.constrained_layout.use": True,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "axes.edgecolor": QUIET,
            "axes.labelcolor": QUIET,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": rcsetup.cycler(color=SERIES),
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "grid.color": LINE,
            "text.color": INK,
            "text.parse_math": False,  # labels may be names from data, in which "$" is a character
            "xtick.color": QUIET,
            "ytick.color": QUIET,
            "legend.frameon": False,
            "font.size": 10,
            "lines.linewidth": 2,
            "svg.fonttype": "none",
            "svg.hashsalt": "forage",
        }
    ):
        yield


@apply_style()
def render_svg(figure: Figure, label: str) -> Markup:
    """Render the figure as an <svg> element that scales with its container, and close it.

    Args:
        label: description of the figure for screen readers.
    """
    from matplotlib import pyplot

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    pyplot.close(figure)
    text = out.getvalue()
    box, body = re.search(r'<svg[^>]* (viewBox="[^"]*")[^>]*>(.*)</svg>', text, re.DOTALL).groups()  # type: ignore[union-attr]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    # Ids are unique in a document, so that each figure prefixes its own.
    prefix = "f" + hashlib.sha256(f"{label}\0{body}".encode()).hexdigest()[:8]
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return Markup(f'<svg {box} role="img" aria-label="{escape(label)}">{body}</svg>')
