"""`make bench-tree`: reference pass and update with each shared token computed once, over those with whole rows.

The model has the shape of SmolLM2-135M and random weights, with fewer layers and a vocabulary smaller in proportion, so
that the output layer has its part of the time. The two ways take turns in one process. Each case prints a line of
JSON: the share of the rows' tokens that is left, the median ratio of seconds (and of processor seconds, which a busy
machine moves less), and the load. The first turn must give the same loss and gradient norm, and does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from random_model import build_random_model, write_random_model

from forage_proto.v1.trajectory_pb2 import PolicySegment, Score, Status, Trajectory, TrajectoryGroup
from forage_runtime.settings import Settings, load_settings
from forage_trainer.data.prefix_tree import count_tokens
from forage_trainer.data.tensors import StepTensors, build_step_tensors, select_trajectories
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trajectory.codec import decode_group, pack_group

LAYERS, VOCABULARY = 30, 49152
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SPREAD = 0.3
"""Lengths of responses are up to this part longer or shorter."""
_FIRST_ID = 3


@dataclass(frozen=True)
class Case:
    """Groups of samples: tokens of the prompt, and of a response on average."""

    samples: int
    prompt: int
    response: int
    prompts: int = 1
    """Prompts of a group: as many as samples, and nothing is shared."""


CASES = {
    "n=4": Case(4, 160, 237),
    "n=8": Case(8, 160, 237),
    "long prompt": Case(8, 1500, 200),
    "nothing shared": Case(4, 160, 237, prompts=4),
}


def build_batch(case: Case, groups: int, vocabulary: int, settings: Settings) -> StepTensors:
    chance = random.Random(1)

    def draw(tokens: int) -> list[int]:
        return [chance.randrange(_FIRST_ID, vocabulary) for _ in range(tokens)]

    made = []
    for position in range(groups):
        begins = [draw(case.prompt) for _ in range(case.prompts)]
        rows = []
        for sample in range(case.samples):
            tokens = round(case.response * (1 + chance.uniform(-SPREAD, SPREAD)))
            rows.append(
                Trajectory(
                    id=f"{position}/{sample}",
                    group_uid=str(position),
                    sample=sample,
                    data_source="made",
                    token_ids=begins[sample % case.prompts] + draw(tokens),
                    prompt_length=case.prompt,
                    loss_mask=[1] * tokens,
                    turn_ids=[1] * tokens,
                    logprobs=[-9.0] * tokens,
                    segments=[PolicySegment(version=0, epoch=1, begin=0, end=tokens)],
                    score=Score(status=Status.STATUS_OK, total=float(sample % 2)),
                    status=Status.STATUS_OK,
                    finished=True,
                )
            )
        group = TrajectoryGroup(group_uid=str(position), position=position, trajectories=rows)
        made.append(decode_group(pack_group(group)))
    algorithm = settings.trainer.algorithm
    batch = build_step_tensors(select_trajectories(made, algorithm), version=0, epoch=1, pad_id=0, settings=algorithm)
    assert batch is not None
    return batch


def take_turn(worker: PolicyWorker, batch: StepTensors, groups: int, once: bool) -> tuple[float, float, float, float]:
    """Seconds, processor seconds, loss and gradient norm of a reference pass and an update."""
    for part in worker._workers:
        part.engine._shares_prefixes = once
    began, cpu = time.perf_counter(), time.process_time()
    reference = worker.reference_log_probs(batch)
    result = worker.update(batch, batch.mask, reference, None, groups)
    return time.perf_counter() - began, time.process_time() - cpu, result.loss, result.grad_norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help=f"of {LAYERS}")
    parser.add_argument("--groups", type=int, default=2, help="of a step")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    vocabulary = VOCABULARY * arguments.layers // LAYERS
    with tempfile.TemporaryDirectory(prefix="forage-bench-tree-") as name:
        folder = write_random_model(Path(name) / "model")  # for its tokenizer
        sizes = {**SHAPE, "num_hidden_layers": arguments.layers, "vocab_size": vocabulary, "initializer_range": 0.02}
        model = build_random_model("llama", 1, **sizes, max_position_embeddings=8192)
        model.save_pretrained(folder)
        overrides = [f"model.path={folder}", f"run.dir={name}", f"trainer.threads={arguments.threads}"]
        # So low that turns do not move the policy.
        overrides += ["trainer.actor.optim.lr=1e-9", f"trainer.actor.ppo_mini_batch_size={arguments.groups}"]
        settings = load_settings(None, overrides, environ={})
        worker = PolicyWorker(settings)
        for case in arguments.cases:
            batch = build_batch(CASES[case], arguments.groups, vocabulary, settings)
            ids = [columns.load().token_ids for columns in batch.columns]
            tokens = sum(map(len, ids))
            ways = (True, False)
            answers = [take_turn(worker, batch, arguments.groups, once)[2:] for once in ways]
            if not all(math.isclose(one, other, rel_tol=1e-3) for one, other in zip(*answers, strict=True)):
                sys.exit(f"{case}: the ways differ in loss and gradient norm: {answers}")
            turns: dict[bool, list[tuple[float, float, float, float]]] = {way: [] for way in ways}
            for number in range(arguments.rounds):
                for once in ways[:: -1 if number % 2 else 1]:
                    turns[once].append(take_turn(worker, batch, arguments.groups, once))

            def ratio(clock: int, turns: dict[bool, list[tuple[float, ...]]] = turns) -> float:
                pairs = zip(turns[True], turns[False], strict=True)
                return statistics.median(one[clock] / whole[clock] for one, whole in pairs)

            left = count_tokens(ids) / tokens
            numbers = {
                "left": left,
                "ratio": ratio(0),
                "ratio_cpu": ratio(1),
                "ratio_over_left": ratio(0) / left,
                "rows_s": statistics.median(turn[0] for turn in turns[False]),
                "load": os.getloadavg()[0],
            }
            sizes_of = {"rows": len(ids), "tokens": tokens, "layers": arguments.layers, "rounds": arguments.rounds}
            rounded = {name: round(value, 3) for name, value in numbers.items()}
            print(json.dumps({"case": case, **rounded, **sizes_of}), flush=True)


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    main()
