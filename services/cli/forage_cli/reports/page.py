"""A page from a template: everything that is filled in is escaped, and only the script that we wrote may run."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from forage_cli.reports.spans import split_spans

_HERE = "forage_cli.reports"


def render(template: str, package: str = _HERE, /, **values: object) -> str:
    """A whole HTML document.

    Args:
        template: its file name; it extends "base.html", and imports its macros from "parts.html" and "trajectory.html".
        package: the package beside whose modules the template lies.
        values: what the template asks for; one that is missing is an error, not an empty place.
    """
    document: str = _make_environment(package).get_template(template).render(values)
    return document


def format_number(value: object) -> str:
    """A figure for people: three decimals, an exponent where these would show nothing, "–" where there is none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
    return str(value)


@cache
def _make_environment(package: str) -> Environment:
    packages = dict.fromkeys((package, _HERE))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, ".") for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.filters["number"] = format_number
    environment.globals.update(split_spans=split_spans, script=script, script_digest=digest)
    return environment
