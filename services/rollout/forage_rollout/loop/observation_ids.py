"""Token ids of observations, in which what was retrieved is only text; messages of a chat, which are only text too.

Escaping works on characters, but the policy reads tokens, and a tokenizer may normalise between the two: NFKC makes
`<answer>` of its full-width form. So the ids are checked, and a text that still made a tag or a control token is
simplified. Any other text keeps the ids that it always had.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence

from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.text.observation import escape_controls, escape_tags, find_reserved_tags


def encode_observation(
    codec: FileTokenizer, opening: str, body: str, closing: str, tags: Sequence[str]
) -> tuple[str, list[int]]:
    """Return the text of an observation and its token ids; only `opening` and `closing` make tags or control tokens.

    Args:
        body: what the environment returned, of any content.
        tags: reserved names besides `RESERVED_TAGS`.
    """
    frame = (opening, closing)
    for simplify in (str, _unify_forms, _keep_words):
        inside = escape_tags(simplify(body), codec.special_tokens, tags)
        text = f"{opening}{inside}{closing}"
        ids = codec.encode(text)
        if not _has_other_controls(codec, ids, frame) and not _has_other_tags(codec, ids, frame, tags):
            return text, ids
    # A word is a control token in this vocabulary, in a form that no escaping finds.
    ids = [token for token in codec.encode(inside) if token not in codec.special_ids]
    return text, [*codec.encode(opening), *ids, *codec.encode(closing)]


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
