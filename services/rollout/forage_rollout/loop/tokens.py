"""The policy's tokenizer outside the engine, to encode observations and decode generations. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from forage_common.errors import DataError


class FileTokenizer:
    """The `tokenizer.json` of a model folder."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
            added = json.loads(file.read_text())["added_tokens"]
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception on any malformed file
            raise DataError(f"{file} is not a tokenizer ({error}): give a complete Hugging Face folder") from None
        self._max_token_chars = max(map(len, self.vocabulary), default=1)
        self._special = tuple(token["content"] for token in added if token["special"])
        self._special_ids = frozenset(int(token["id"]) for token in added if token["special"])

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token → id."""
        return cast(dict[str, int], self._tokenizer.get_vocab())

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Control tokens that retrieved text must not produce."""
        return self._special

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of `special_tokens`."""
        return self._special_ids

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; every id is below."""
        return cast(int, self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def max_token_chars(self) -> int:
        """Largest number of characters that one token stands for."""
        return self._max_token_chars

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without control tokens before or after."""
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, with control tokens."""
        return cast(str, self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
