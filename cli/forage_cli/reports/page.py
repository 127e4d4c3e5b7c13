"""HTML pages from templates: values are escaped, and the content security policy allows only our script."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from forage_records.spans import split_spans

_HERE = "forage_cli.reports"


def render(template: str, package: str = _HERE, /, **values: object) -> str:
    """Render a whole HTML document.

    Args:
        template: file name; it extends "base.html", and imports its macros from "parts.html" and "trajectory.html".
        package: the package that contains the template.
        values: variables of the template; a missing one is an error.
    """
    document: str = _make_environment(package).get_template(template).render(values)
    return document


def format_number(value: object) -> str:
    """Format a number with three decimals, small ones with an exponent, None as "–"."""
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
