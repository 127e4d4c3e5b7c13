"""Observations as text: formatted passages, and escaped tags that cannot be taken for the policy's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from forage_proto.v1.trajectory_pb2 import Document

RESERVED_TAGS = ("think", "search", "information", "answer")
_NAME = re.compile(r"</?([A-Za-z][\w-]*)>")


def format_passages(documents: Sequence[Document]) -> str:
    """Format each document as "Doc 1(Title: first line) other lines\\n".

    A document without a newline has only a title.
    """
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, body = document.contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {body}\n")
    return "".join(lines)


def escape_tags(text: str, special_tokens: Iterable[str] = (), tags: Iterable[str] = ()) -> str:
    """Escape reserved tags and the tokenizer's control tokens; the text stays readable.

    Nothing is removed, so no new tag can form from the pieces of another; a second pass changes nothing.

    Args:
        text: what a retriever or another environment returned.
        special_tokens: strings that the tokenizer would turn into control tokens, such as "<|im_end|>".
        tags: reserved names besides `RESERVED_TAGS`.
    """
    return escape_controls(_pattern(frozenset(tags)).sub(r"&lt;\1&gt;", text), special_tokens)


def escape_controls(text: str, special_tokens: Iterable[str]) -> str:
    """Escape a tokenizer's control tokens alone, as `escape_tags` does: a question may name tags."""
    for token in sorted(special_tokens, key=len, reverse=True):
        if token:
            text = text.replace(token, _entities(token))
    return text


def find_tag_names(text: str) -> list[str]:
    """Find the names of the tags in a text."""
    return _NAME.findall(text)


def find_reserved_tags(text: str, tags: Iterable[str] = ()) -> list[str]:
    """Find the tags, such as "</answer>", that `escape_tags` would escape."""
    return [found[0] for found in _pattern(frozenset(tags)).finditer(text)]


@lru_cache(maxsize=256)
def _pattern(tags: frozenset[str]) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in sorted(tags.union(RESERVED_TAGS)))
    return re.compile(rf"<(/?(?:{names}))>")


def _entities(token: str) -> str:
    named = token.replace("<", "&lt;").replace(">", "&gt;")
    return named if named != token else f"&#{ord(token[0])};{token[1:]}"
