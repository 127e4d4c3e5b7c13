"""One update of the trainer's worker, and where asked the speed of the next ones.

`python update.py OUT ROUNDS GROUPS SAMPLES LENGTH key=value …` writes log-probabilities, values, the gradients of actor
and critic and the actor's step to OUT.npz (nothing without the suffix), and prints loss, norms, seconds, peak memory.
LENGTH: tokens of every trajectory; 0: the spread of lengths of `lab/benchmarks/trainer/batch.py`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import batch as made
import numpy as np
import torch

from forage_runtime.settings import AdvantageEstimator, load_settings
from forage_trainer.algorithms.estimators.gae import gae
from forage_trainer.algorithms.estimators.grpo import grpo_outcome
from forage_trainer.data.tensors import StepTensors
from forage_trainer.engine.policy_worker import PolicyWorker

BETA1 = 0.9
"""Of AdamW: its first moment after one step is 1 - BETA1 of the gradient."""
TIMED_PROMPT = 128
"""Tokens of the prompt of a trajectory of a given length; all others are trained on."""


def collect_gradients(worker: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Each parameter's gradient at the first step, in fp32, from the optimizer's state."""
    names = {id(parameter): name for name, parameter in worker.engine.module.named_parameters()}
    gradients = {}
    for parameter, state in worker.engine.optimizer.state.items():
        moment = state["exp_avg"]
        local = moment.full_tensor() if hasattr(moment, "full_tensor") else moment
        gradients[names[id(parameter)]] = (local.float() / (1 - BETA1)).cpu().numpy()
    return gradients


def make_long(groups: int, samples: int, length: int, vocabulary: int, settings: Any) -> StepTensors:
    """Rows of one length with tokens of the whole vocabulary: what a benchmark of speed needs."""
    from forage_proto.v1.trajectory_pb2 import PolicySegment, Score, Status, Trajectory, TrajectoryGroup
    from forage_trainer.data.tensors import build_step_tensors, select_trajectories

    chance, response = random.Random(0), length - TIMED_PROMPT

    def make(group: int, sample: int) -> Trajectory:
        return Trajectory(
            id=f"{group}-{sample}",
            group_uid=f"g{group}",
            sample=sample,
            data_source="timed",
            token_ids=[chance.randrange(vocabulary) for _ in range(length)],
            prompt_length=TIMED_PROMPT,
            loss_mask=[1] * response,
            turn_ids=[1] * response,
            logprobs=[-9.0] * response,
            segments=[PolicySegment(version=0, epoch=1, begin=0, end=response)],
            score=Score(status=Status.STATUS_OK, total=float(sample % 2)),
            status=Status.STATUS_OK,
            finished=True,
        )

    rows = [
        TrajectoryGroup(group_uid=f"g{g}", position=g, trajectories=[make(g, s) for s in range(samples)])
        for g in range(groups)
    ]
    tensors = build_step_tensors(select_trajectories(rows, settings), version=0, epoch=1, pad_id=0, settings=settings)
    assert tensors is not None
    return tensors


def main(out: Path, rounds: int, groups: int, samples: int, length: int, overrides: list[str]) -> None:
    settings = load_settings(overrides=overrides, environ={})
    algorithm = settings.trainer.algorithm
    vocabulary = json.loads((settings.model.path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    if length:
        batch = make_long(groups, samples, length, vocabulary, algorithm)
    else:
        batch = made.tensors(groups, algorithm, samples)
    on_gpu = torch.cuda.is_available()
    worker = PolicyWorker(settings)
    saved: dict[str, np.ndarray[Any, Any]] = {"log_probs": worker.log_probs(batch).float().cpu().numpy()}
    if algorithm.adv_estimator is AdvantageEstimator.GAE:
        values = worker.values(batch)
        saved["values"] = values.float().cpu().numpy()
        advantages, returns = gae(batch.token_rewards, values, batch.mask, algorithm.gamma, algorithm.lam)
    else:
        advantages = grpo_outcome(batch.token_rewards, batch.mask, batch.uids)
    reference = worker.reference_log_probs(batch)
    before = worker.weights(torch.float32) if out.suffix else {}

    def update() -> dict[str, float]:
        if algorithm.adv_estimator is AdvantageEstimator.GAE:
            critic = worker.update_critic(batch, values, returns, groups)
        result = worker.update(batch, advantages, reference, None, groups)
        figures = {"loss": result.loss, "grad_norm": result.grad_norm, "entropy": result.entropy}
        if algorithm.adv_estimator is AdvantageEstimator.GAE:
            figures |= {"critic_loss": critic["critic/vf_loss"], "critic_grad_norm": critic["critic/grad_norm"]}
        return figures

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    figures: dict[str, Any] = update()
    if out.suffix:
        saved |= {f"actor/{name}": value for name, value in collect_gradients(worker._actor).items()}
        if worker._critic is not None:
            saved |= {f"critic/{name}": value for name, value in collect_gradients(worker._critic.worker).items()}
        after = worker.weights(torch.float32)
        saved |= {f"moved/{name}": (after[name] - before[name]).numpy() for name in before}
        np.savez(out, **saved)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        update()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    lengths = batch.data["input_ids"].offsets().diff()
    figures |= {
        "tokens": int(lengths.sum()),
        "rows": len(lengths),
        "seconds": min(seconds, default=0.0),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "parameters": worker.parameters,
    }
    worker.close()
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]), sys.argv[6:])
