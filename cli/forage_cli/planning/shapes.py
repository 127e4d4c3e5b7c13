"""The shape of a model: from its config.json, or by name where its folder is not here yet."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_runtime.errors import UserError


@dataclass(frozen=True)
class Shape:
    """A dense decoder: gated MLP, grouped-query attention, RMSNorm.

    Attributes:
        source: where the numbers are from: a folder, or the name of a known model.
        biases: numbers in the biases of one layer.
        norms: RMSNorms over the hidden size in one layer.
        has_head_norms: whether each head of queries and keys has an RMSNorm, too.
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
    biases: int = 0
    norms: int = 2
    has_head_norms: bool = False

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
        norms = self.norms * self.hidden + (2 * self.head_size if self.has_head_norms else 0)
        return attention + self.biases + 3 * self.hidden * self.intermediate + norms

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
    size = hidden // heads
    return Shape(name, hidden, inner, layers, heads, kv, size, vocabulary, tied, biases=hidden + 2 * kv * size)


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
"""Name → shape, from the models' published config.json (docs/reference/data.md)."""


@dataclass(frozen=True)
class _Architecture:
    """What distinguishes an architecture from Llama's, and the defaults of its class in Transformers.

    A published config.json leaves out what equals the default of its class.
    """

    norms: int = 2
    has_head_norms: bool = False
    has_input_biases: bool = False
    is_tied: bool = False
    head_size: int | None = None


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(),
    "MistralForCausalLM": _Architecture(),
    "Qwen2ForCausalLM": _Architecture(has_input_biases=True),
    "Qwen3ForCausalLM": _Architecture(has_head_norms=True, head_size=128),
    "Gemma2ForCausalLM": _Architecture(norms=4, is_tied=True, head_size=256),
    "Gemma3ForCausalLM": _Architecture(norms=4, has_head_norms=True, is_tied=True, head_size=256),
}
"""Those whose parameters and KV cache are counted right; tests compare each with a published model."""


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a folder, or of the known model whose name the folder has.

    Raises:
        UserError: there is no such folder and no such name, or the model is of another architecture.
    """
    file = folder / "config.json"
    if not file.is_file():
        return _get_known(folder)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        name = config["architectures"][0]
        architecture = _ARCHITECTURES.get(name)
        if architecture is not None:
            return _parse(config, architecture, str(folder))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{file} has no shape that a plan can use ({type(error).__name__}: {error}): expected the configuration of "
            f"one of {', '.join(_ARCHITECTURES)}"
        ) from None
    raise UserError(
        f"{file} is of {name}, whose parameters and KV cache no plan counts: expected one of "
        f"{', '.join(_ARCHITECTURES)}; such a model can be trained, but not planned"
    )


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


def _parse(config: dict[str, Any], architecture: _Architecture, source: str) -> Shape:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    hidden, intermediate = int(config["hidden_size"]), int(config["intermediate_size"])
    head_size = int(config.get("head_dim") or architecture.head_size or hidden // heads)
    inputs = (heads + 2 * kv_heads) * head_size
    biases = inputs if architecture.has_input_biases else 0
    if not biases and config.get("attention_bias"):
        biases = inputs + hidden
    if config.get("mlp_bias"):
        biases += 2 * intermediate + hidden
    shape = Shape(
        source,
        hidden,
        intermediate,
        int(config["num_hidden_layers"]),
        heads,
        kv_heads,
        head_size,
        int(config["vocab_size"]),
        bool(config.get("tie_word_embeddings", architecture.is_tied)),
        biases,
        architecture.norms,
        architecture.has_head_norms,
    )
    numbers = dataclasses.asdict(shape)
    for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_size", "vocabulary"):
        if numbers[name] < 1:
            raise ValueError(f"{name} is {numbers[name]}")
    return shape
