"""The shape of a model: from its config.json, or by name where its folder is not here yet."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_common.errors import UserError


@dataclass(frozen=True)
class Shape:
    """A dense decoder in the layout of Llama and Qwen: gated MLP, grouped-query attention, RMSNorm.

    Attributes:
        source: where the numbers are from: a folder, or the name of a known model.
    """

    source: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool
    has_bias: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Of keys, and again of values."""
        return self.kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        bias = self.query_width + 2 * self.kv_width if self.has_bias else 0
        return attention + bias + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the output layer, and again of the embedding where they are not tied."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        heads = 1 if self.is_tied else 2
        return self.layers * self.layer_parameters + heads * self.head_parameters + self.hidden

    def count_adapter_parameters(self, rank: int) -> int:
        """Of LoRA adapters of all linear layers but the output layer, as PEFT's all-linear has them."""
        pairs = [(self.hidden, self.query_width), (self.query_width, self.hidden)]
        pairs += [(self.hidden, self.kv_width)] * 2
        pairs += [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return self.layers * rank * sum(sum(pair) for pair in pairs)

    def count_kv_bytes(self, bytes_each: int = 2, tensor_parallel: int = 1) -> int:
        """Bytes of the KV cache of a token on one GPU; vLLM repeats heads where there are fewer than GPUs."""
        return 2 * self.layers * max(1, -(-self.kv_heads // tensor_parallel)) * self.head_size * bytes_each

    def can_shard(self, tensor_parallel: int) -> bool:
        """Whether vLLM computes it on so many GPUs: heads and the MLP are divided, or few heads of keys repeated."""
        few, many = sorted((self.kv_heads, tensor_parallel))
        return self.heads % tensor_parallel == self.intermediate % tensor_parallel == many % few == 0

    def count_flops(self, length: float) -> float:
        """Operations of a forward pass a token, in a causal sequence of this many tokens."""
        matrices = self.layers * self.layer_parameters + self.head_parameters
        return 2.0 * matrices + 2.0 * self.layers * self.query_width * length


def _qwen(name: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool) -> Shape:
    return Shape(name, hidden, inner, layers, heads, kv, hidden // heads, vocabulary, tied, has_bias=True)


KNOWN = {
    shape.source: shape
    for shape in (
        Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 64, 49152, is_tied=True),
        _qwen("Qwen2.5-0.5B", 896, 4864, 24, 14, 2, 151936, True),
        _qwen("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 151936, True),
        _qwen("Qwen2.5-3B", 2048, 11008, 36, 16, 2, 151936, True),
        _qwen("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 152064, False),
        Shape("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256, is_tied=False),
        _qwen("Qwen2.5-14B", 5120, 13824, 48, 40, 8, 152064, False),
        _qwen("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 152064, False),
    )
}
"""Name → shape, from the models' published config.json (docs/data.md)."""


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a folder, or of the known model whose name the folder has.

    Raises:
        UserError: there is no such folder and no such name, or the model is of another kind.
    """
    file = folder / "config.json"
    if not file.is_file():
        return _get_known(folder)
    try:
        config = json.loads(file.read_text())
        return _parse(config, str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{file} has no shape that a plan can use ({type(error).__name__}: {error}): expected a dense decoder in "
            "the layout of Llama or Qwen"
        ) from None


def _get_known(folder: Path) -> Shape:
    name = re.sub(r"[-_](instruct|base|chat)$", "", folder.name.lower())
    name = re.sub(r"^(meta[-_])?llama-?3(\.1)?-8b$", "llama-3-8b", name)
    for known, shape in KNOWN.items():
        if known.lower() == name:
            return shape
    raise UserError(
        f"model.path {folder} has no config.json, and its name is none of {', '.join(KNOWN)}: give the model's folder, "
        "or one with such a name"
    )


def _parse(config: dict[str, Any], source: str) -> Shape:
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError("a mixture of experts")
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    shape = Shape(
        source,
        hidden,
        int(config["intermediate_size"]),
        int(config["num_hidden_layers"]),
        heads,
        int(config.get("num_key_value_heads") or heads),
        int(config.get("head_dim") or hidden // heads),
        int(config["vocab_size"]),
        bool(config.get("tie_word_embeddings", False)),
        has_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
    )
    numbers = dataclasses.asdict(shape)
    for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_size", "vocabulary"):
        if numbers[name] < 1:
            raise ValueError(f"{name} is {numbers[name]}")
    return shape
