"""Readable texts of single tokens, from a model folder's tokenizer.json alone."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path


class TokenTexts:
    """Decodes token ids one by one. Without a readable vocabulary a token is shown as `<id>`."""

    def __init__(self, folder: Path) -> None:
        self._tokens: dict[int, str] = {}
        self._added: dict[int, str] = {}
        self._byte_level = False
        try:
            content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            vocabulary = content["model"]["vocab"].items()
            added = {entry["id"]: entry["content"] for entry in content.get("added_tokens") or ()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return  # showing trajectories must work without the model
        self._tokens = {number: text for text, number in vocabulary}
        self._added = added
        self._byte_level = "ByteLevel" in json.dumps(content.get("decoder"))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return one text per token; a character that spans several tokens is in the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = []
        for number in ids:
            token = self._tokens.get(number)
            if token is not None and self._byte_level and number not in self._added:
                texts.append(decoder.decode(bytes(_bytes().get(character, 0x3F) for character in token)))
                continue
            decoder.reset()
            texts.append(self._added.get(number) or (f"<{number}>" if token is None else token.replace("▁", " ")))
        return texts


@cache
def _bytes() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for, as in GPT-2's table."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
