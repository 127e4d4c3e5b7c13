"""Tiny random models with a tokenizer of their own, for tests of real engines. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def build_tokenizer(text: str = "") -> PreTrainedTokenizerFast:
    """Build a tokenizer of control tokens, single bytes, the most frequent pieces of a text, and the tags of the search
    format."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=CONTROLS, initial_alphabet=LETTERS, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 9, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=CONTROLS[0], eos_token=CONTROLS[2], chat_template=CHAT_TEMPLATE
    )


def build_random_model(kind: str, seed: int, **sizes: Any) -> PreTrainedModel:
    """Build a random float32 model of a kind that transformers knows; `sizes` add to SIZES and replace them."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_random_model(folder: Path, seed: int = 7, text: str = "", **sizes: Any) -> Path:
    """Write a random Qwen2 with a tokenizer for a text, in the Hugging Face layout."""
    tokenizer = build_tokenizer(text)
    tokenizer.save_pretrained(folder)
    build_random_model("qwen2", seed, **{"vocab_size": len(tokenizer), **sizes}).save_pretrained(folder)
    return folder


def write_value_model(folder: Path, policy: Path, seed: int = 8) -> Path:
    """Write a value model with the body of a policy and a random head, so that its body has gradients at once."""
    torch.manual_seed(seed)
    model = AutoModelForTokenClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
