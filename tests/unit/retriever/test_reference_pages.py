"""docs/reference: the forage index command and the HTTP routes of the retriever service."""

from __future__ import annotations

from reference_pages import assert_commands_current, assert_openapi_current


def test_the_page_of_commands_is_current() -> None:
    assert_commands_current("index")


def test_the_openapi_description_is_current() -> None:
    assert_openapi_current("retriever")
