"""The policy's tokenizer outside the engine, to encode observations and decode generations. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from forage_runtime.errors import DataError


class FileTokenizer:
    """The `tokenizer.json` of a model folder."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
            content = json.loads(file.read_text(encoding="utf-8"))
            added, unknown = content["added_tokens"], _find_unknown_token(content["model"])
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception on any malformed file
            raise DataError(f"{file} is not a tokenizer ({error}): give a complete Hugging Face folder") from None
        self._max_token_chars = max(map(len, self.vocabulary), default=1)
        self._special = tuple(token["content"] for token in added if token["special"])
        self._special_ids = frozenset(
            int(token["id"]) for token in added if token["special"] and token["content"] != unknown
        )

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
        """Ids of `special_tokens`, without that of an unknown character, which commands nothing."""
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


def _find_unknown_token(model: Mapping[str, Any]) -> str | None:
    """What a tokenizer's model makes of characters that it does not know, if it names that."""
    if model.get("unk_id") is not None:  # of Unigram, whose vocabulary is a list of texts and scores
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")
