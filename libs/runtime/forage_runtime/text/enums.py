"""Names of the values of protobuf's enums, as files, logs and pages show them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any


def name_value(enum: Any, number: int, whole: bool = False) -> str:
    """Return the name of a value without the prefix that all values of its enum have.

    A message may hold numbers that this version does not know: of a later version, or of somebody who means harm.

    Args:
        enum: such as `Status`.
        whole: with the prefix.

    Example:
        name_value(Status, Status.STATUS_OK) == "OK"
        name_value(Status, 99) == "UNKNOWN_99"
    """
    prefix = _prefix(enum.DESCRIPTOR.name)
    try:
        name: str = enum.Name(number)
    except ValueError:
        name = f"{prefix}UNKNOWN_{number}"
    return name if whole else name.removeprefix(prefix)


@cache
def _prefix(enum: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", enum).upper() + "_"
