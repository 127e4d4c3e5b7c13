"""`python -m forage_trainer.weights.gguf_model FILE.gguf OUT`: convert a GGUF file to a Hugging Face folder, in fp32.

Weights keep the file's quantization error. The tokenizer is built from the file's own tables and has its chat template.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from forage_runtime.errors import DataError
from forage_runtime.files.folders import stage_folder
from forage_runtime.settings import PublishSettings
from forage_trainer.weights.checkpoint_tensors import build_checkpoint
from forage_weights.trainer.model_files import WeightsFile, write_model_folder

_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
}
"""How a text is split before pairs are merged, by the name in the file."""
_CONTROL, _USER_DEFINED = 3, 4


def convert(source: Path, target: Path) -> tuple[WeightsFile, ...]:
    """Write the model of a GGUF file to `target`, which is complete or absent. Returns the files of weights.

    Raises:
        DataError: the file is no GGUF, its tokenizer is of an unknown kind, or `target` exists.
    """
    if target.exists():
        raise DataError(f"{target} exists: name a folder that does not")
    try:
        fields = GGUFReader(source).fields
    except (OSError, ValueError, IndexError) as error:
        raise DataError(
            f"{source} cannot be read as GGUF ({' '.join(str(error).split())[:200]}): get it again"
        ) from None
    values = {name: field.contents() for name, field in fields.items()}
    tokenizer = _build_tokenizer(source, values)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.config.name_or_path = ""
    # transformers counts the model as quantized, because of the file that it was read from; its tensors are fp32 now.
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    weights = build_checkpoint(model, torch.Tensor.detach, torch.Tensor.detach)
    with tempfile.TemporaryDirectory() as config_folder, stage_folder(target) as folder:
        tokenizer.save_pretrained(config_folder)
        model.config.save_pretrained(config_folder)
        return write_model_folder(folder, Path(config_folder), weights, PublishSettings().shard_bytes)


def _build_tokenizer(source: Path, values: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer from the file's tables."""
    kind, pre_tokenizer = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre_tokenizer not in _PRE_TOKENIZERS:
        known = " or ".join(f"gpt2 with {name!r}" for name in _PRE_TOKENIZERS)
        raise DataError(
            f"{source} has a tokenizer of the kind {kind!r} with {pre_tokenizer!r}: {known} can be converted"
        )
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre_tokenizer]()
    backend.decoder = decoders.ByteLevel()
    is_special = {_CONTROL: True, _USER_DEFINED: False}
    kinds = zip(tokens, values["tokenizer.ggml.token_type"], strict=True)
    backend.add_tokens([AddedToken(t, special=is_special[k], normalized=False) for t, k in kinds if k in is_special])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {
        name: tokens[values[f"tokenizer.ggml.{key}_token_id"]]
        for key, name in names.items()
        if f"tokenizer.ggml.{key}_token_id" in values
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=values[f"{values['general.architecture']}.context_length"],
        **named,
    )
    tokenizer.chat_template = values.get("tokenizer.chat_template")
    return tokenizer


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
