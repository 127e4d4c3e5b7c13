"""What ends a generation: tokens at once, texts that are spelt in pieces when they are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Stops:
    """vLLM's sampling arguments for stop texts, which stay part of the generation.

    Args:
        vocabulary: token → id.
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self._known: dict[tuple[str, ...], dict[str, Any]] = {}

    def arguments(self, stop: tuple[str, ...]) -> dict[str, Any]:
        """The same dictionary for the same texts: not to be changed."""
        if stop not in self._known:
            ids = stop_token_ids(self._vocabulary, stop)
            self._known[stop] = {"stop": list(stop), "stop_token_ids": ids, "include_stop_str_in_output": True}
        return self._known[stop]


def stop_token_ids(vocabulary: Mapping[str, int], stop: Sequence[str]) -> list[int]:
    """Every token whose text holds a whole stop text, also with a space or more around it."""
    return sorted(id for token, id in vocabulary.items() if any(text in token for text in stop))
