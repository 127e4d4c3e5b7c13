"""One of several trainer processes (torchrun), or the only one: every call of a step, with its results.

`python -m torch.distributed.run … spmd_process.py MODEL OUT.safetensors [shared] [key.key=value …]`
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from arrived_groups import arrive
from safetensors.torch import save_file
from trainer_parts import PROMPT_TOKENS, build_trajectory

from forage_proto.v1.trajectory_pb2 import TrajectoryGroup
from forage_runtime.settings import Settings, load_settings
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker, UpdateResult
from forage_trainer.engine.spmd import follow
from forage_trainer.weights.publication import Snapshots
from forage_trajectory.trajectory import ColumnFolder

OPTIONS = [
    "trainer.threads=1",
    "trainer.algorithm.adv_estimator=gae",
    "trainer.actor.ppo_mini_batch_size=1",
    "trainer.actor.ppo_max_token_len_per_gpu=120",
    "trainer.actor.optim.lr=1e-6",
    "trainer.actor.optim.clip_grad=1e9",
    "trainer.actor.kl_loss_coef=0.3",
    "trainer.actor.entropy_coeff=0.02",
    "trainer.critic.optim.lr=1e-6",
]


def build_settings(model: Path, *more: str) -> Settings:
    return load_settings(None, [f"model.path={model}", f"run.dir={model.parent / 'runs'}", *OPTIONS, *more], {})


SHARED = "shared"
"""Argument of the process: rows of a group begin with the same tokens."""
_SHARED_TOKENS = PROMPT_TOKENS + 2


def build_rows(settings: Settings, folder: ColumnFolder | None = None, shared: bool = False) -> StepTensors:
    """Two groups, of four rows and of three: of 2 processes, one runs out of rows.

    Args:
        folder: where their columns are, as those of groups that have arrived; None: in memory.
        shared: whether rows of a group have the same prompt and begin alike.
    """
    groups = [
        TrajectoryGroup(
            group_uid=uid,
            position=position,
            trajectories=[
                build_trajectory(uid, i, float(i % 2), turns=(3 + i, 4 + 2 * i), observation=2 * i + 1)
                for i in range(count)
            ],
        )
        for position, (uid, count) in enumerate((("a", 4), ("b", 3)))
    ]
    for group in groups if shared else []:
        for row in group.trajectories:
            row.token_ids[:_SHARED_TOKENS] = group.trajectories[0].token_ids[:_SHARED_TOKENS]
    algorithm = settings.trainer.algorithm
    arrived = [arrive(group, folder) for group in groups]
    batch = build_step_tensors(select_trajectories(arrived, algorithm), 0, 1, 0, algorithm)
    assert batch is not None
    return batch


def take_step(
    worker: PolicyWorker, batch: StepTensors
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, UpdateResult]:
    """Compute all that a worker with a critic computes of a batch, with the gradients of both.

    Returns:
        What any two ways of computing it must agree on; the reference's log-probabilities; and the update.
    """
    assert worker._critic is not None
    actor = record_gradients(worker._actor.engine, "actor")
    critic = record_gradients(worker._critic.worker.engine, "critic")
    old, reference, values = worker.log_probs(batch), worker.reference_log_probs(batch), worker.values(batch)
    advantages = torch.linspace(-1, 1, batch.mask.numel()).view_as(batch.mask) * batch.mask
    result = worker.update(batch, advantages, reference, old + 0.1 * advantages, 2)
    learned = worker.update_critic(batch, values, advantages * 2, 2)
    del learned["critic/vpred_mean"]  # a mean of means of micro-batches, which two ways cut in different places
    numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "entropy": result.entropy, **learned}
    results = {name: torch.tensor(value) for name, value in numbers.items()} | {"old": old, "values": values}
    return results | {"seen": result.log_probs} | actor | critic, reference, result


def record_gradients(engine: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Record the full gradients of every later update in the returned mapping."""
    gradients: dict[str, torch.Tensor] = {}
    count = 0

    def record(*_: Any) -> None:
        nonlocal count
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                gradients[f"{prefix}.{count}.{name}"] = parameter.grad.full_tensor().detach().clone()
        count += 1

    engine.optimizer.register_step_pre_hook(record)
    return gradients


def run(worker: PolicyWorker, settings: Settings, state: Path, shared: bool) -> dict[str, torch.Tensor]:
    """Call every method of a worker that the loop calls."""
    batch = build_rows(settings, worker.columns, shared)
    old, reference = worker.log_probs(batch), worker.reference_log_probs(batch)
    assert reference is not None
    values = worker.values(batch)
    advantages = torch.linspace(-1, 1, batch.mask.numel()).view_as(batch.mask) * batch.mask
    returns = advantages.flip(0) * 2
    results = {"old": old, "reference": reference, "values": values}
    results["old_too"], results["entropies"] = worker.log_probs_and_entropies(batch)

    def step(name: str) -> None:
        result = worker.update(batch, advantages, reference, old, 2)
        critic = worker.update_critic(batch, values, returns, 2)
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "entropy": result.entropy, "lr": result.lr}
        numbers |= {key: critic[key] for key in ("critic/vf_loss", "critic/grad_norm", "critic/lr")}
        results.update({f"{name}.{key}": torch.tensor(value) for key, value in numbers.items()})

    step("first")
    worker.save(state)
    step("second")
    worker.load(state)
    step("again")
    results["log_probs"], results["critic"] = worker.log_probs(batch), worker.values(batch)
    for number, openings in enumerate(([[5, 6, 7, 8], [9] * 100, [11, 12]], [[5, 6, 7, 8]])):  # one row has two ranks
        _, canary = Snapshots(settings, worker, lambda: "float32", nullcontext, openings, 0).take()
        assert canary is not None
        given = [value for row in canary.rows for value in row.logprobs]
        results[f"canary.{number}"] = torch.tensor(given)
    results["log_probs_then"] = worker.log_probs(batch)
    single = worker.update(batch, advantages, reference, None, 2)
    assert single.entropies is not None
    results["seen"], results["seen_entropies"] = single.log_probs, single.entropies
    assert (single.shared_share > 0) == shared, "rows of a process that begin alike are computed so"
    return results | {f"weights.{name}": tensor for name, tensor in worker.weights(torch.float32).items()}


def main(model: Path, out: Path, *more: str) -> None:
    settings = build_settings(model, *(one for one in more if one != SHARED))
    worker = PolicyWorker(settings)
    actor = record_gradients(worker._actor.engine, "actor")
    critic = record_gradients(worker._critic.worker.engine, "critic")  # type: ignore[union-attr]
    if worker.processes.rank:
        follow(worker)
        return
    try:
        results = run(worker, settings, out.with_suffix(".state"), SHARED in more)
    finally:
        worker.close()
    everything = results | actor | critic
    save_file({name: tensor.contiguous() for name, tensor in everything.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
