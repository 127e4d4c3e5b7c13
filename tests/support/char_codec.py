"""A tokenizer of single characters, for scripted engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


class CharCodec:
    """One token a character; `extra` strings are tokens of their own, wherever they occur."""

    def __init__(self, extra: Sequence[str] = (), special: Sequence[str] = ()) -> None:
        self._extra = sorted((*extra, *special), key=len, reverse=True)
        self._special = tuple(special)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self._special

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(0x110000 + self._extra.index(token) for token in self._special)

    @property
    def vocabulary_size(self) -> int:
        return 0x110000 + len(self._extra)

    @property
    def max_token_chars(self) -> int:
        return max(map(len, self._extra), default=1)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            token = next((i for i, extra in enumerate(self._extra) if text.startswith(extra)), None)
            ids.append(ord(text[0]) if token is None else 0x110000 + token)
            text = text[1 if token is None else len(self._extra[token]) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(i) if i < 0x110000 else self._extra[i - 0x110000] for i in token_ids)


@pytest.fixture(scope="session")
def char_codec() -> type[CharCodec]:
    return CharCodec
