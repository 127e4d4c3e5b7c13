"""One of several trainer processes (torchrun), or the only one: takes steps from states that other numbers wrote.

`python -m torch.distributed.run … reshard_process.py MODEL OUT STATE,… [key.key=value …]`

For each STATE, or `-` for the initial one: load it, save it as `OUT/<name>`, take a step, and write what came of it to
`OUT/<name>.safetensors`. From `-` a step is taken before it is saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from spmd_process import build_rows

from forage_runtime.settings import Settings, load_settings
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.engine.spmd import follow

OPTIONS = [
    "trainer.threads=1",
    "trainer.actor.ppo_mini_batch_size=2",
    "trainer.actor.ppo_max_token_len_per_gpu=120",
    "trainer.actor.optim.lr=1e-3",
    "trainer.actor.optim.lr_warmup_steps=10",
    "trainer.actor.kl_loss_coef=0.3",
    "trainer.critic.optim.lr=1e-3",
]
NUMBERS = ("loss", "grad_norm", "lr", "critic/vf_loss", "critic/grad_norm", "critic/lr")


def build_settings(model: Path, *more: str) -> Settings:
    return load_settings(None, [f"model.path={model}", f"run.dir={model.parent / 'runs'}", *OPTIONS, *more], {})


def take_step(worker: PolicyWorker, settings: Settings) -> dict[str, torch.Tensor]:
    """Update policy and critic once; returns numbers of the step and weights after it."""
    batch = build_rows(settings)
    advantages = torch.linspace(-1, 1, batch.mask.numel()).view_as(batch.mask) * batch.mask
    result = worker.update(batch, advantages, worker.reference_log_probs(batch), None, 2)
    numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
    if settings.trainer.algorithm.adv_estimator == "gae":
        numbers |= worker.update_critic(batch, worker.values(batch), advantages.flip(0) * 2, 2)
    weights = {f"weights.{name}": tensor for name, tensor in worker.weights(torch.float32).items()}
    return {name: torch.tensor(numbers[name]) for name in NUMBERS if name in numbers} | weights


def main(model: Path, out: Path, states: list[str], *more: str) -> None:
    settings = build_settings(model, *more)
    worker = PolicyWorker(settings)
    if worker.processes.rank:
        follow(worker)
        return
    try:
        for state in states:
            if state == "-":
                take_step(worker, settings)
                take_step(worker, settings)
            else:
                worker.load(Path(state))
            name = out / f"{Path(state).name if state != '-' else 'own'}_by_{worker.world_size}"
            name.mkdir(parents=True)
            worker.save(name)
            save_file(take_step(worker, settings), name.with_suffix(".safetensors"))
    finally:
        worker.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), *sys.argv[4:])
