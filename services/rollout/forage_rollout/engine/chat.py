"""Chats as token ids, through the chat template of the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a chat with the opening of the assistant's turn.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.

    Raises:
        ValueError: the chat template rejects the messages.
    """
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise ValueError(str(error)) from None
    return [int(token) for token in ids]
