"""Names of the values of protobuf's enums."""

from __future__ import annotations

from forage_proto.v1.trajectory_pb2 import ActionKind, Status
from forage_runtime.text.enums import name_value


def test_values_are_named_without_the_prefix_of_their_enum() -> None:
    assert name_value(Status, Status.STATUS_OK) == "OK"
    assert name_value(ActionKind, ActionKind.ACTION_KIND_SEARCH) == "SEARCH"
    assert name_value(Status, Status.STATUS_TIMEOUT, whole=True) == "STATUS_TIMEOUT"


def test_a_number_that_this_version_does_not_know_has_a_name_too() -> None:
    assert name_value(Status, 99) == "UNKNOWN_99"
    assert name_value(ActionKind, -1, whole=True) == "ACTION_KIND_UNKNOWN_-1"
