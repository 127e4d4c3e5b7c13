"""docs/reference: the HTTP routes of the rollout service, and its command."""

from __future__ import annotations

from reference_pages import assert_commands_current, assert_openapi_current


def test_the_openapi_description_is_current() -> None:
    assert_openapi_current("rollout")


def test_the_page_of_the_command_line_has_the_worker() -> None:
    assert_commands_current("worker")
