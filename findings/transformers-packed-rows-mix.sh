#!/usr/bin/env bash
# transformers 5.19.0 (torch 2.13.0, CPU): two rows packed into one, with position_ids that begin anew at 0 and no attention
# mask, are kept apart in most families, as Llama, Qwen3 and GPT-2: the mask is made from the positions, and the logits are
# those of the two rows alone. GPT-OSS, OPT, Falcon and BioGPT take the same position_ids without an error or a warning, and
# use them for the positions alone: their masks are made without them, so each token of the second row sees the first row too,
# and its logits are off by 3 and more of random weights. So trainers that pack rows that way train and score another
# model than the one that generates one row at a time.
# Expected: rows kept apart in each family that takes position_ids, or an error.
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.19.0 numpy==2.4.6
cat > "$folder/pack.py" <<'P'
import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
usual = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
grouped = usual | dict(num_key_value_heads=2, head_dim=8)
families = {
    "llama": grouped,
    "qwen3": grouped,
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
    "gpt_oss": grouped | dict(num_local_experts=4, num_experts_per_tok=2),
    "opt": dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32),
    "falcon": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "biogpt": usual,
}
for family, sizes in families.items():
    torch.manual_seed(0)
    tokens = dict(vocab_size=64, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    config = AutoConfig.for_model(family, initializer_range=0.3, **tokens, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = torch.randint(0, 64, (1, 7)), torch.randint(0, 64, (1, 9))
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.no_grad():
        alone = [model(row, use_cache=False).logits for row in rows]
        packed = model(torch.cat(rows, 1), position_ids=positions, use_cache=False).logits.split([7, 9], dim=1)
    first, second = ((own - other).abs().max().item() for own, other in zip(alone, packed))
    print(f"{family}: first row off by {first:.1f}, second row off by {second:.1f}")
P
seen=$("$folder/venv/bin/python" "$folder/pack.py" 2>/dev/null)
printf '%s\n' "$seen"
for family in llama qwen3 gpt2; do
  grep -qx "$family: first row off by 0.0, second row off by 0.0" <<< "$seen" || { echo "changed"; exit 1; }
done
for family in gpt_oss opt falcon biogpt; do
  grep -qE "^$family: first row off by 0.0, second row off by [1-9]" <<< "$seen" || { echo "changed"; exit 1; }
done
