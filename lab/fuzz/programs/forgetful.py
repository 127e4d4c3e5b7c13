"""A list that stays empty: what scripted parts note of each call would look like a leak."""

from __future__ import annotations

from typing import Any


class Forgetful(list[Any]):
    """Remembers nothing."""

    def append(self, one: object) -> None:
        pass
