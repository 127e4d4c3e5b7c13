"""Characters that every encoding has."""

from __future__ import annotations


def replace_halves(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which no message and no file can hold."""
    return text.encode(errors="replace").decode()
