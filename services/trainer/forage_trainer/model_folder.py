"""The initial policy's folder: is it one, and how long are prompts under its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forage_common.errors import DataError

_CHUNK = 1024


def check_model_folder(folder: Path) -> dict[str, Any]:
    """The model's configuration.

    Raises:
        DataError: the folder is not a Hugging Face model with safetensors weights.
    """
    hint = "give model.path a Hugging Face folder with config.json, tokenizer and safetensors"
    if not folder.is_dir():
        raise DataError(f"model folder {folder} does not exist: {hint}")
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise DataError(f"model folder {folder} has no config.json: {hint}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"model folder {folder}: config.json is not readable JSON ({error}): {hint}") from None
    if not isinstance(config, dict) or len(config.get("architectures") or []) != 1:
        raise DataError(f"model folder {folder}: config.json must name one architecture: {hint}")
    if not any(folder.glob("*.safetensors")):
        raise DataError(f"model folder {folder} has no *.safetensors: {hint}")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise DataError(f"model folder {folder} has no tokenizer: {hint}")
    return config


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
        """A token id that may stand where nothing is read."""
        found = self._tokenizer.pad_token_id
        return 0 if found is None else int(found)

    def lengths(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[int]:
        """Tokens of each conversation under the chat template, generation prompt included."""
        found: list[int] = []
        for begin in range(0, len(prompts), _CHUNK):
            texts = self._tokenizer.apply_chat_template(
                [list(p) for p in prompts[begin : begin + _CHUNK]], add_generation_prompt=True, tokenize=False
            )
            encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            found += [len(ids) for ids in encoded]
        return found
