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
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except Exception as error:  # noqa: BLE001 - a template is a program, which may raise anything
        raise ValueError(" ".join(str(error).split())) from None
    return [int(token) for token in ids]
