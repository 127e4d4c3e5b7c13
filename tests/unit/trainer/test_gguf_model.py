"""A GGUF file becomes a Hugging Face folder of the same model and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from random_model import LETTERS, build_random_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from forage_runtime.errors import DataError
from forage_runtime.files.model_folder import check_model_folder, read_end_of_turn
from forage_trainer.weights.gguf_model import convert

SPECIALS = ["<unk>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *LETTERS, "he", "Ġhe"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS = {"attn_q": 4, "attn_k": 2}
PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return build_random_model("llama", 3, vocab_size=len(TOKENS), **heads).eval()


def write(file: Path, model: PreTrainedModel, cut: str = "smollm") -> Path:
    """Write the model as llama.cpp does: other names, and query and key rows in the order of its rotation."""
    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(2)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        writer.add_tensor(*_rename_tensor(name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _rename_tensor(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name], array
    _, _, layer, place = name.removesuffix(".weight").split(".", 3)
    own = PLACES[place]
    if own in HEADS:
        split = array.reshape(HEADS[own], 2, array.shape[0] // HEADS[own] // 2, array.shape[1])
        array = np.ascontiguousarray(split.swapaxes(1, 2).reshape(array.shape))
    return f"blk.{layer}.{own}.weight", array


def test_the_folder_holds_the_same_model_and_a_tokenizer_that_ends_turns(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    out = tmp_path / "models" / "made"
    convert(write(tmp_path / "small.gguf", model), out)
    check_model_folder(out)
    assert read_end_of_turn(out) == "<|im_end|>"
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    converted = AutoModelForCausalLM.from_pretrained(out)
    assert converted.dtype == torch.float32
    assert converted.lm_head.weight.data_ptr() == converted.model.embed_tokens.weight.data_ptr()
    ids = torch.arange(40).reshape(2, 20) * 6 % len(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in ("he said 42, héhé!", "a<|im_start|>b", " he"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" he 42")) == ["Ġhe", "Ġ", "4", "2"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert tokenizer.encode(chat) == [1, TOKENS.index("he"), 2]


def test_a_file_that_cannot_be_converted_is_named_and_leaves_nothing(tmp_path: Path, model: PreTrainedModel) -> None:
    out = tmp_path / "made"
    with pytest.raises(DataError, match="'gpt2' with 'other': gpt2 with 'smollm' can be converted"):
        convert(write(tmp_path / "other.gguf", model, cut="other"), out)
    (tmp_path / "text.gguf").write_text("no model at all, but long enough to look for a magic number")
    for file in (tmp_path / "text.gguf", tmp_path / "gone.gguf"):
        with pytest.raises(DataError, match=rf"{file.name} cannot be read as GGUF"):
            convert(file, out)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(DataError, match="made exists"):
        convert(tmp_path / "other.gguf", out)
