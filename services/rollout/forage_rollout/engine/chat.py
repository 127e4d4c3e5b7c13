"""Chats as token ids, through the chat template of the policy's tokenizer."""

from __future__ import annotations

from typing import Any

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.loop.generation import RenderedPrompt
from forage_runtime.files.template_values import read_template_values
from forage_runtime.text.chat_template import Chat, ChatTemplate


def render_chat(tokenizer: Any, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
    """Render a chat with the beginning of the assistant's turn.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        values: what the template gets besides the messages.

    Raises:
        ValueError: the chat template rejects the messages, or the values are malformed.
    """
    rendered = ChatTemplate(tokenizer).render(messages, *read_template_values(values or TemplateValues()))
    ids = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    return RenderedPrompt([int(token) for token in ids], rendered.opening)
