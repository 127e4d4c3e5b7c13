#!/usr/bin/env bash
# transformers 5.19.0 with gguf 0.19.0: from_pretrained(folder, gguf_file=…) de-quantises every tensor, and its weights are
# plain float32; but the model counts as quantised all the same. Its configuration has a quantization_config of gguf, and
# save_pretrained refuses it ("quantized with GGUF and is not serializable"), even where the file held float32 from the
# beginning. Who writes the folder by other means puts that quantization_config beside float32 tensors, which vLLM 0.32
# refuses to load. Expected, as the documentation of transformers shows it: from_pretrained and then save_pretrained turn a
# GGUF file into a plain folder. Remedy: del model.config.quantization_config, model.hf_quantizer = None, and
# model.is_quantized = False before saving.
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 transformers==5.19.0 gguf==0.19.0 numpy==2.3.5 accelerate==1.15.0
cat > "$folder/save.py" <<'P'
import sys
from pathlib import Path

import gguf
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
folder = Path(sys.argv[1])
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=64, tie_word_embeddings=False, **sizes))
writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(64)
writer.add_feed_forward_length(128)
writer.add_head_count(4)
writer.add_head_count_kv(4)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_rope_dimension_count(16)
writer.add_vocab_size(32)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
for name, value in model.state_dict().items():
    stem, _, suffix = name.rpartition(".")
    writer.add_tensor(f"{names.get_name(stem)}.{suffix}", value.numpy().astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()


def save(read):
    try:
        read.save_pretrained(folder / "saved")
        return "saved"
    except ValueError as error:
        return "refused: " + str(error).split(" - ")[0]


read = LlamaForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf")
print("types of the weights:", {str(one.dtype) for one in read.parameters()})
print("method in the configuration:", read.config.quantization_config.quant_method.value)
print("save_pretrained:", save(read))
del read.config.quantization_config
read.hf_quantizer, read.is_quantized = None, False
print("save_pretrained after the remedy:", save(read))
P
found=$("$folder/venv/bin/python" "$folder/save.py" "$folder" 2>/dev/null)
printf '%s\n' "$found"
expected="types of the weights: {'torch.float32'}
method in the configuration: gguf
save_pretrained: refused: The model is quantized with QuantizationMethod.GGUF and is not serializable
save_pretrained after the remedy: saved"
[ "$found" = "$expected" ]
