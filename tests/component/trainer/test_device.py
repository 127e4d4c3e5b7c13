"""`trainer.device=cpu` in a process of its own: GPUs are hidden before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys


def test_gpus_are_hidden_from_a_trainer_on_cpus_before_torch_is_loaded() -> None:
    lines = ["import os, sys", "from forage_trainer.device import prepare_device"]
    lines += [
        "from forage_runtime.settings import TrainerSettings",
        "on = prepare_device(TrainerSettings(device='cpu'))",
    ]
    lines += ["print(on, repr(os.environ['CUDA_VISIBLE_DEVICES']), 'torch' in sys.modules)"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert done.stdout == "False '' False\n", done.stderr
