"""Tiny models with their own tokenizer, and tables of examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import Receiver, traced_process
from scripted_engine import CharCodec

DATA = Path(__file__).resolve().parents[2] / "data" / "rollout"
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A collector; this process traces, as the rollout service."""
    with traced_process("rollout") as made:
        yield made


@pytest.fixture(scope="session")
def char_codec() -> type[CharCodec]:
    return CharCodec


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument named `<file>_row` runs once a row of that data file."""
    for argument in metafunc.fixturenames:
        if argument.endswith("_row"):
            table = rows(argument.removesuffix("_row"))
            metafunc.parametrize(argument, table, ids=[str(number) for number in range(len(table))])


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function seed → folder of a random Qwen2 with tied embeddings, whose byte-level tokenizer knows the tags."""

    def make(seed: int) -> Path:
        import torch
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

        folder = tmp_path_factory.mktemp(f"model-{seed}")
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=control, initial_alphabet=alphabet, show_progress=False
        )
        raw.train_from_iterator(["the capital of France is Paris, the search for an answer"] * 9, trainer)
        raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
        )
        tokenizer.save_pretrained(folder)
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        Qwen2ForCausalLM(config).float().save_pretrained(folder)
        return folder

    return make
