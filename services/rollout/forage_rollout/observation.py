"""What the environment says: passages and feedback as text that cannot pretend to be anybody's tags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from forage_common.v1.trajectory_pb2 import Document

RESERVED_TAGS = ("think", "search", "information", "answer")
CLOSING = "</information>\n\n"
FEEDBACK = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
_TAG = re.compile(rf"<(/?(?:{'|'.join(RESERVED_TAGS)}))>")


def escape(text: str, special_tokens: Iterable[str] = ()) -> str:
    """The text without reserved tags and without the tokenizer's control tokens, readable as before.

    Nothing is removed, so taking one tag apart cannot put another together; a second pass changes nothing.

    Args:
        text: what a retriever returned.
        special_tokens: strings that the tokenizer would turn into control tokens, such as "<|im_end|>".
    """
    text = _TAG.sub(r"&lt;\1&gt;", text)
    for token in sorted(special_tokens, key=len, reverse=True):
        if token:
            text = text.replace(token, _entities(token))
    return text


def _entities(token: str) -> str:
    named = token.replace("<", "&lt;").replace(">", "&gt;")
    return named if named != token else f"&#{ord(token[0])};{token[1:]}"


def passages(documents: Sequence[Document], special_tokens: Iterable[str] = ()) -> str:
    """ "Doc 1(Title: first line) other lines\\n" for every document, escaped.

    A document without a newline is all title.
    """
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, body = document.contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {body}\n")
    return escape("".join(lines), special_tokens)


def information(documents: Sequence[Document], special_tokens: Iterable[str] = ()) -> str:
    """The observation that answers a search; it ends with `CLOSING`."""
    return f"\n\n<information>{passages(documents, special_tokens).strip()}{CLOSING}"
