"""Checks that the generated pages of the command line and of the API are current, for tests in any environment."""

from __future__ import annotations

import json

import api_doc
import cli_doc

_REMEDY = "run 'make reference' and commit"


def assert_commands_current(part: str) -> None:
    """Fail unless docs/reference/cli.md shows a part's commands as this environment has them."""
    assert cli_doc.render_section(part) in cli_doc.DOCUMENT.read_text(encoding="utf-8"), (
        f"docs/reference/cli.md: {_REMEDY}"
    )


def assert_openapi_current(service: str) -> None:
    """Fail unless the OpenAPI file and the page describe the routes of this environment's service."""
    file = api_doc.OPENAPI / f"{service}.json"
    described = json.loads(api_doc.describe_http_api(service))
    assert json.loads(file.read_text(encoding="utf-8")) == described, f"{file.name}: {_REMEDY}"
    page = api_doc.DOCUMENT.read_text(encoding="utf-8")
    assert api_doc.render_http_section(service, described) in page, f"docs/reference/api.md: {_REMEDY}"
