"""Stop texts as vLLM's sampling arguments.

A token that holds a whole stop text stops by id, which costs nothing; vLLM searches the text for those that are sampled
in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class StopTexts:
    """vLLM's sampling arguments for stop texts, which stay part of the generation.

    Args:
        vocabulary: token → id.
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self._cache: dict[tuple[str, ...], dict[str, Any]] = {}

    def build_arguments(self, stop: tuple[str, ...]) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`. The result is cached and must not be changed."""
        if stop not in self._cache:
            ids = find_stop_tokens(self._vocabulary, stop)
            self._cache[stop] = {"stop": list(stop), "stop_token_ids": ids, "include_stop_str_in_output": True}
        return self._cache[stop]


def find_stop_tokens(vocabulary: Mapping[str, int], stop: Sequence[str]) -> list[int]:
    """Ids of all tokens whose text contains a whole stop text, whatever is around it."""
    return sorted(id for token, id in vocabulary.items() if any(text in token for text in stop))
