#!/usr/bin/env bash
# verl 0.9.1 (torch 2.13.0, CPU): a group whose samples all have the same reward has nothing to teach, but its GRPO
# advantages are not 0. The mean of eight float32 rewards of 0.3 is one rounding error off, the standard deviation is of
# the same size (3e-8), and the advantage is their quotient, held down only by the 1e-6 in the denominator: 0.029 for 0.3,
# 0.056 for 0.7, -0.056 for 0.9, for all samples of the group alike. Whether it happens depends on the reward and on the
# number of samples: 1.0, or five samples of 0.3, give 0. In a batch of such groups alone Adam divides the small gradient by
# its own size, and the first step moves a weight by the whole learning rate, as for a group of unequal rewards.
# Expected: 0, as for rewards of 0 and 1, which is also what filters of groups without a signal are built on.
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.19.0 numpy==2.4.6 \
  accelerate==1.15.0 ray==2.60.0 tensordict==0.10.0 omegaconf==2.3.1 codetiming==1.4.0 dill==0.4.1 packaging psutil
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps verl==0.9.1  # what the estimators import is above
cat > "$folder/advantages.py" <<'P'
import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage


def advantage(rewards):
    count = len(rewards)
    scores = torch.zeros(count, 4)
    scores[:, -1] = torch.tensor(rewards)
    return compute_grpo_outcome_advantage(scores, torch.ones(count, 4), np.array(["group"] * count))[0]


def step(rewards):
    """How far Adam moves one weight that raises the log-probability of every token of the first four samples."""
    weight = torch.nn.Parameter(torch.zeros(()))
    adam = torch.optim.Adam([weight], lr=1e-3)
    rows = torch.tensor([1.0] * 4 + [0.0] * 4)[:, None]
    loss = -(advantage(rewards) * (weight * rows).exp())
    agg_loss(loss, torch.ones_like(loss), "token-mean").backward()
    adam.step()
    return abs(weight.item())


for reward in (0.3, 0.7, 0.9, 1.0):
    for count in (5, 8):
        print(f"{count} samples of {reward}: advantage {advantage([reward] * count)[0, 0].item():.3f}")
print(f"Adam's first step of 0.001: {step([0.3] * 8):.5f} for equal, {step([1.0] * 4 + [0.0] * 4):.5f} for unequal rewards")
P
seen=$("$folder/venv/bin/python" "$folder/advantages.py" 2>/dev/null | tail -9)
printf '%s\n' "$seen"
grep -qE "^8 samples of 0.3: advantage 0.02[0-9]" <<< "$seen" &&
  grep -qx "5 samples of 0.3: advantage 0.000" <<< "$seen" &&
  grep -qE "^8 samples of 0.7: advantage 0.05[0-9]" <<< "$seen" &&
  grep -qx "8 samples of 1.0: advantage 0.000" <<< "$seen" &&
  grep -qx "Adam's first step of 0.001: 0.00100 for equal, 0.00100 for unequal rewards" <<< "$seen" ||
  { echo "changed"; exit 1; }
