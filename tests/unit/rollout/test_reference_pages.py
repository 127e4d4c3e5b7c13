"""docs/reference: the HTTP routes of the rollout service."""

from __future__ import annotations

from reference_pages import assert_openapi_current


def test_the_openapi_description_is_current() -> None:
    assert_openapi_current("rollout")
