"""The policy's tokenizer, which measures the length of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forage_common.errors import DataError

_CHUNK = 1024


class ChatTokenizer:
    """The policy's tokenizer with its chat template."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            DataError: the tokenizer cannot be loaded, or has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"model folder {folder}: its tokenizer cannot be loaded ({reason})") from None
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(f"model folder {folder}: its tokenizer has no chat template: add chat_template.jinja")

    @property
    def pad_id(self) -> int:
        """The token id for padding; 0 where the tokenizer names none, since padding is never read."""
        pad_id = self._tokenizer.pad_token_id
        return 0 if pad_id is None else int(pad_id)

    def count_prompt_tokens(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[int]:
        """Number of tokens of each conversation under the chat template, generation prompt included."""
        lengths: list[int] = []
        for begin in range(0, len(prompts), _CHUNK):
            texts = self._tokenizer.apply_chat_template(
                [list(p) for p in prompts[begin : begin + _CHUNK]], add_generation_prompt=True, tokenize=False
            )
            encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            lengths += [len(ids) for ids in encoded]
        return lengths
