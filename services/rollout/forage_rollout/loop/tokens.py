"""Text and tokens outside the engine: the policy's tokenizer, observations in which what was retrieved is only text.

Escaping works on characters, but the policy reads tokens, and a tokenizer may normalise between the two: NFKC makes
`<answer>` of its full-width form. So the ids are checked, and a text that still made a tag or a control token is
simplified. Any other text keeps the ids that it always had. Messages of a chat are only text, too. Needs no torch."""

from __future__ import annotations

import json
import unicodedata
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from forage_runtime.errors import DataError
from forage_runtime.text.observation import escape_controls, escape_tags, find_reserved_tags

OBSERVATIONS = 1024
"""The last ones are kept with their token ids: samples of a group search for the same, and find the same passages."""
LONGEST_KEPT = 2**14
"""Characters of the longest one that is kept: together they take about 200 MB where characters have 4 bytes."""


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


def encode_observation(
    codec: FileTokenizer, opening: str, body: str, closing: str, tags: Sequence[str]
) -> tuple[str, list[int]]:
    """Return the text of an observation and its token ids; only `opening` and `closing` make tags or control tokens.

    Args:
        body: what the environment returned, of any content.
        tags: reserved names besides `RESERVED_TAGS`.
    """
    encode = _encode_or_recall if len(body) <= LONGEST_KEPT else _encode_observation
    text, ids = encode(codec, opening, body, closing, tuple(tags))
    return text, ids.tolist()


def _encode_observation(
    codec: FileTokenizer, opening: str, body: str, closing: str, tags: tuple[str, ...]
) -> tuple[str, array[int]]:
    frame = (opening, closing)
    for simplify in (str, _unify_forms, _keep_words):
        inside = escape_tags(simplify(body), codec.special_tokens, tags)
        text = f"{opening}{inside}{closing}"
        ids = codec.encode(text)
        if not _has_other_controls(codec, ids, frame) and not _has_other_tags(codec, ids, frame, tags):
            return text, array("I", ids)
    # A word is a control token in this vocabulary, in a form that no escaping finds.
    ids = [token for token in codec.encode(inside) if token not in codec.special_ids]
    return text, array("I", [*codec.encode(opening), *ids, *codec.encode(closing)])


_encode_or_recall = lru_cache(OBSERVATIONS)(_encode_observation)


def escape_message(codec: FileTokenizer, text: str) -> str:
    """Return a text of a chat without control tokens: those that end its turns are the template's alone.

    Tags stay, since the instruction of a question names them.
    """
    for simplify in (str, _unify_forms, _keep_words):
        shown = escape_controls(simplify(text), codec.special_tokens)
        if codec.special_ids.isdisjoint(codec.encode(shown)):
            return shown
    while not codec.special_ids.isdisjoint(ids := codec.encode(shown)):  # without a word, others may meet and form it
        shown = codec.decode([token for token in ids if token not in codec.special_ids])
    return shown


def _has_other_controls(codec: FileTokenizer, ids: Sequence[int], frame: tuple[str, str]) -> bool:
    """Whether there are control tokens that neither end of the observation has."""
    if codec.special_ids.isdisjoint(ids):
        return False
    return bool(
        _count_controls(codec, ids) - sum((_count_controls(codec, codec.encode(end)) for end in frame), Counter())
    )


def _count_controls(codec: FileTokenizer, ids: Sequence[int]) -> Counter[int]:
    return Counter(token for token in ids if token in codec.special_ids)


def _has_other_tags(codec: FileTokenizer, ids: Sequence[int], frame: tuple[str, str], tags: Sequence[str]) -> bool:
    """Whether the policy reads reserved tags that neither end of the observation has."""
    read = Counter(find_reserved_tags(codec.decode(ids), tags))
    if not read - Counter(find_reserved_tags("".join(frame), tags)):
        return False
    # The tokenizer may have changed the ends, too.
    return bool(read - Counter(find_reserved_tags("".join(codec.decode(codec.encode(end)) for end in frame), tags)))


def _unify_forms(text: str) -> str:
    """Full-width and other compatibility forms as plain characters, which escaping then sees."""
    return unicodedata.normalize("NFKC", text)


def _keep_words(text: str) -> str:
    """Letters, digits and white space alone: of these no tokenizer makes a tag."""
    return "".join(character if character.isalnum() or character.isspace() else " " for character in text)
