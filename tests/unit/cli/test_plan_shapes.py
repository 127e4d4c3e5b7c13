"""Shapes of models: known names, published configurations against published numbers, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forage_cli.planning.shapes import KNOWN, read_shape
from forage_runtime.errors import UserError

REPOSITORY = Path(__file__).parents[3]


def write_config(
    folder: Path, architecture: str, sizes: tuple[int, int, int, int, int, int] = (8, 8, 1, 2, 1, 9), **others: Any
) -> Path:
    """The folder, with a config.json of hidden and MLP size, layers, heads, heads of keys, and vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = dict(zip((*names, "vocab_size"), sizes, strict=True))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]} | others))
    return folder


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.135),
        ("Qwen2.5-0.5B", 0.49),
        ("Qwen2.5-1.5B", 1.54),
        ("Qwen2.5-3B", 3.09),
        ("Qwen2.5-7B", 7.61),
        ("Llama-3-8B", 8.03),
        ("Qwen2.5-14B", 14.7),
        ("Qwen2.5-32B", 32.5),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_shape_is_read_from_a_folder_and_counts_what_its_files_hold() -> None:
    from forage_weights.tensors import read_headers

    folder = REPOSITORY / "models" / "tiny-policy"
    shape = read_shape(folder)
    tensors = read_headers(sorted(folder.glob("*.safetensors")))
    sizes = []
    for tensor in tensors.values():
        size = 1
        for length in tensor.shape:
            size *= length
        sizes.append(size)
    assert shape.parameters == sum(sizes)


@pytest.mark.parametrize("name", ["Qwen2.5-3B", "qwen2.5-3b-instruct", "models/Qwen2.5-3B-Instruct"])
def test_a_known_model_is_planned_before_its_folder_is_here(name: str, tmp_path: Path) -> None:
    assert read_shape(tmp_path / name) is KNOWN["Qwen2.5-3B"]


PUBLISHED = [
    # Llama 3.2's model cards: 1.23 and 3.21 billion.
    ("LlamaForCausalLM", (2048, 8192, 16, 32, 8, 128256), {"tie_word_embeddings": True}, 1_235_814_400),
    ("LlamaForCausalLM", (3072, 8192, 28, 24, 8, 128256), {"tie_word_embeddings": True}, 3_212_749_824),
    # The model cards of Mistral-7B-v0.3 and of Mistral-Nemo: 7.25 and 12.2 billion.
    ("MistralForCausalLM", (4096, 14336, 32, 32, 8, 32768), {}, 7_248_023_552),
    ("MistralForCausalLM", (5120, 14336, 40, 32, 8, 131072), {"head_dim": 128}, 12_247_782_400),
    # Qwen2.5's report: 3.09 billion.
    ("Qwen2ForCausalLM", (2048, 11008, 36, 16, 2, 151936), {"tie_word_embeddings": True}, 3_085_938_688),
    # Qwen3's model cards: 0.6 and 8.2 billion.
    (
        "Qwen3ForCausalLM",
        (1024, 3072, 28, 16, 8, 151936),
        {"head_dim": 128, "tie_word_embeddings": True},
        596_049_920,
    ),
    ("Qwen3ForCausalLM", (4096, 12288, 36, 32, 8, 151936), {"head_dim": 128}, 8_190_735_360),
    # Gemma 2's report, arXiv:2408.00118, table 2: 2,024,517,888, 8,324,201,984 and 26,047,480,320 without the
    # embedding, which its published files have for 256,000 tokens.
    ("Gemma2ForCausalLM", (2304, 9216, 26, 8, 4, 256000), {"head_dim": 256}, 2_024_517_888 + 256_000 * 2304),
    ("Gemma2ForCausalLM", (3584, 14336, 42, 16, 8, 256000), {"head_dim": 256}, 8_324_201_984 + 256_000 * 3584),
    ("Gemma2ForCausalLM", (4608, 36864, 46, 32, 16, 256000), {"head_dim": 128}, 26_047_480_320 + 256_000 * 4608),
    # Gemma 3's report, arXiv:2503.19786, table 1: 302 million of the embedding and 698 million.
    ("Gemma3ForCausalLM", (1152, 6912, 26, 4, 1, 262144), {"head_dim": 256}, 999_885_952),
    # No published model: every bias that Llama's class has, counted by Transformers 5.19.
    ("LlamaForCausalLM", (2048, 8192, 16, 32, 8, 128256), {"attention_bias": True, "mlp_bias": True}, 1_498_859_520),
]
"""Architecture, published configuration, and number of parameters: the published one where its digits are known, else
that which Transformers 5.19 counts, which rounds to the published one."""


@pytest.mark.parametrize(("architecture", "sizes", "others", "parameters"), PUBLISHED)
def test_a_published_configuration_has_the_published_number_of_parameters(
    architecture: str,
    sizes: tuple[int, int, int, int, int, int],
    others: dict[str, Any],
    parameters: int,
    tmp_path: Path,
) -> None:
    assert read_shape(write_config(tmp_path, architecture, sizes, **others)).parameters == parameters


def test_heads_keep_their_own_size_in_the_kv_cache(tmp_path: Path) -> None:
    """Gemma 2 2B: 26 layers, 4 heads of 256 numbers for keys and values, where hidden / heads would be 288."""
    shape = read_shape(write_config(tmp_path, "Gemma2ForCausalLM", (2304, 9216, 26, 8, 4, 256000)))
    assert shape.count_kv_bytes() == 26 * 2 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("architecture", "others"),
    [
        ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 64, "moe_intermediate_size": 1536}),
        ("Qwen3MoeForCausalLM", {"num_experts": 128}),
        ("MixtralForCausalLM", {"num_local_experts": 8}),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 256, "kv_lora_rank": 512}),
        ("MiniCPM3ForCausalLM", {"kv_lora_rank": 256, "qk_rope_head_dim": 32}),
        ("BertForMaskedLM", {}),
        ("Gemma3ForConditionalGeneration", {}),
        ("Phi3ForCausalLM", {}),
    ],
)
def test_another_architecture_is_refused_by_its_name(architecture: str, others: dict[str, Any], tmp_path: Path) -> None:
    folder = write_config(tmp_path, architecture, **others)
    with pytest.raises(UserError, match=rf"config.json is of {architecture}, .*expected one of LlamaForCausalLM"):
        read_shape(folder)


def test_an_unknown_model_and_a_damaged_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"model.path .*mystery has no config.json, and its name is none of SmolLM2-135M"
    ):
        read_shape(tmp_path / "mystery")
    for text in ("[1]", "{}", '{"architectures": []}', '{"architectures": [["x"]]}', '{"architectures": "Llama"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config.json (has no shape that a plan can use|is of L)"):
            read_shape(tmp_path)
