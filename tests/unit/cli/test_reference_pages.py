"""docs/reference: the commands of the cli package and the gRPC contracts."""

from __future__ import annotations

from reference_pages import assert_commands_current


def test_the_page_of_commands_is_current() -> None:
    assert_commands_current("forage")
