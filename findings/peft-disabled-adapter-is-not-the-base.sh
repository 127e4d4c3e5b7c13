#!/usr/bin/env bash
# PEFT 0.21.2 (transformers 5.19.0, torch 2.13.0, CPU): with init_lora_weights "pissa" or "olora" a new adapter leaves the
# outputs as they are, but takes its part out of the base weights. disable_adapter() then gives neither the base model nor an
# error or a warning: log-probabilities of a random two-layer Qwen3 are off by 4 and more. TRL and verl compute
# the reference policy of a LoRA run in just that context, so its KL penalty is measured against a broken model. The same is
# true of the saved adapter on the plain base, for a program that computes W + B·A·alpha/r itself, as engines do; only PEFT,
# which repeats the decomposition as it loads, gets the trained model from it. "orthogonal", which too begins with an
# adapter that is not 0, puts the base back as it is disabled.
# Expected: disable_adapter() gives the outputs of the base model for each initialisation, or refuses.
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 transformers==5.19.0 peft==0.21.2 accelerate==1.15.0 numpy==2.4.6
cat > "$folder/compare.py" <<'P'
import copy
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, logging

logging.set_verbosity_error()
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
base = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, head_dim=8, initializer_range=0.2, **sizes)).eval()
tokens = torch.randint(0, 64, (1, 12))


def score(model):
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1)


def add_saved(folder):
    """The base model plus what the file of the adapter says."""
    plain = copy.deepcopy(base)
    pairs = load_file(folder + "/adapter_model.safetensors")
    for name in [name for name in pairs if ".lora_A." in name]:
        weight = plain.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A.")[0]).weight
        weight.data += pairs[name.replace(".lora_A.", ".lora_B.")] @ pairs[name]
    return plain


for init in (True, "orthogonal", "pissa", "olora"):
    config = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights=init)
    model = get_peft_model(copy.deepcopy(base), config).eval()
    new = (score(model) - score(base)).abs().max()
    with model.disable_adapter():
        disabled = (score(model) - score(base)).abs().max()
    model.save_pretrained(sys.argv[1])
    saved = (score(add_saved(sys.argv[1])) - score(model)).abs().max()
    print(f"{init}: new adapter {new:.1f} off the base, disabled {disabled:.1f} off, base and file {saved:.1f} off the model")
P
seen=$("$folder/venv/bin/python" "$folder/compare.py" "$folder/adapter" 2>/dev/null)
printf '%s\n' "$seen"
for init in pissa olora; do
  grep -qE "^$init: new adapter 0.0 off the base, disabled [1-9]\.[0-9] off, base and file [1-9][0-9]*\.[0-9] off" <<< "$seen" ||
    { echo "changed"; exit 1; }
done
grep -qE "^True: new adapter 0.0 off the base, disabled 0.0 off, base and file 0.0 off" <<< "$seen" || { echo "changed"; exit 1; }
