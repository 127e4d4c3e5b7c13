"""The policy's tokenizer, which measures the length of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forage_records.questions import RejectedPromptError
from forage_runtime.errors import DataError
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.chat_template import ChatTemplate, TemplateError
from forage_runtime.text.observation import escape_controls
from forage_trainer.chats.template_facts import Level, list_matters

_CHUNK = 1024


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder, with its chat template.

    Raises:
        DataError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"model folder {folder}: its tokenizer cannot be loaded ({reason})") from None
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"model folder {folder}: its tokenizer has no chat template: add chat_template.jinja")
    return tokenizer


class ChatTokenizer:
    """The policy's tokenizer with its chat template.

    facts: what of the template matters to a run of these settings.
    """

    def __init__(self, settings: Settings) -> None:
        """Load it from `model.path`; its template gets the variables and the date of `data`.

        Raises:
            DataError: the tokenizer cannot be loaded, or has no chat template.
        """
        self._data = settings.data
        self._tokenizer = load_tokenizer(settings.model.path)
        self._controls = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._template = ChatTemplate(self._tokenizer)
        self.facts = list_matters(self._template, settings)
        for fact in self.facts:
            write = get_logger().warning if fact.level is Level.WARNING else get_logger().info
            write("chat_template", topic=fact.topic, detail=fact.describe())

    @property
    def pad_id(self) -> int:
        """The token id for padding; 0 where the tokenizer names none, since padding is never read."""
        pad_id = self._tokenizer.pad_token_id
        return 0 if pad_id is None else int(pad_id)

    def count_prompt_tokens(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[int]:
        """Number of tokens of each conversation under the chat template, generation prompt included.

        Control tokens in a message are text, as the rollout service reads them.

        Raises:
            RejectedPromptError: the template rejects a conversation, such as one with a role that it does not have.
        """
        lengths: list[int] = []
        for begin in range(0, len(prompts), _CHUNK):
            lengths += map(len, self.encode_prompts(prompts[begin : begin + _CHUNK], begin))
        return lengths

    def encode_prompts(self, prompts: Sequence[Sequence[dict[str, str]]], first: int = 0) -> list[list[int]]:
        """The tokens of each conversation, as `count_prompt_tokens` counts them; raises as it does.

        Args:
            first: number of the first conversation, by which an error names one.
        """
        texts = [self._render(prompt, number) for number, prompt in enumerate(prompts, first)]
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return encoded

    def _render(self, prompt: Sequence[dict[str, str]], number: int) -> str:
        chat = [{name: escape_controls(text, self._controls) for name, text in message.items()} for message in prompt]
        try:
            return self._template.render_text(chat, self._data.apply_chat_template_kwargs, self._data.template_date)
        except TemplateError as error:
            raise RejectedPromptError(number, str(error)) from None
