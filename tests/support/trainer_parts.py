"""Real parts in small, for tests of the trainer: a random policy, questions, a rollout service that has a script."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import (
    Component,
    Policy,
    PolicySegment,
    Prompt,
    Purpose,
    Replica,
    Role,
    Score,
    Span,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_queue.streams.client import Entry, StreamClient
from forage_queue.streams.prompt_identity import build_group
from forage_queue.trainer.batcher import ConsumedStep
from forage_runtime.settings import RedisSettings
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.manifest import Stateful
from forage_trajectory.codec import pack_group

PROMPT_TOKENS = 12
VOCABULARY = 300


def build_question(index: int, source: str = "world_facts", split: str = "train") -> dict[str, object]:
    """One row in the Search-R1 layout."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Question: what is number {index}?"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [f"n{index}"]}},
        "extra_info": {"split": split, "index": index},
    }


def write_questions(path: Path, count: int, split: str = "train", source: str = "world_facts") -> Path:
    pq.write_table(pa.Table.from_pylist([build_question(i, source, split) for i in range(count)]), path)
    return path


def write_model(folder: Path) -> Path:
    """Write a random policy whose tokens `trajectory` draws from."""
    from random_model import write_random_model  # imports torch

    return write_random_model(folder, vocab_size=VOCABULARY)


def build_trajectory(
    uid: str,
    sample: int,
    reward: float,
    version: int = 0,
    epoch: int = 1,
    status: Status.ValueType = Status.STATUS_OK,
    score_status: Status.ValueType = Status.STATUS_OK,
    turns: Sequence[int] = (6, 5),
    observation: int = 7,
    seed: int = 0,
) -> Trajectory:
    """Model tokens in turns with observations between them; all token ids follow from uid, sample and seed."""
    draw = random.Random(hashlib.sha256(f"{uid}/{sample}/{seed}".encode()).digest())
    mask: list[int] = []
    for number, length in enumerate(turns):
        mask += [0] * observation if number else []
        mask += [1] * length
    tokens = [draw.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS + len(mask))]
    return Trajectory(
        id=f"test/{uid}/{sample}",
        run_id="test",
        group_uid=uid,
        sample=sample,
        data_source="world_facts",
        token_ids=tokens,
        prompt_length=PROMPT_TOKENS,
        loss_mask=mask,
        turn_ids=[1 if one else -1 for one in mask],
        logprobs=[-5.7 if one else 0.0 for one in mask],
        segments=[PolicySegment(version=version, epoch=epoch, begin=0, end=len(mask))] if mask else [],
        spans=[Span(role=Role.ROLE_MODEL, begin=PROMPT_TOKENS, end=len(tokens), text="text")],
        score=Score(
            status=score_status,
            total=reward,
            components=[Component(name="format", raw=1.0, weighted=0.0)],
            reward="search_r1_format",
        ),
        validation_score=Score(status=score_status, total=float(reward >= 1), reward="em"),
        finished=True,
        valid_actions=1,
        valid_searches=sample % 2,
        status=status,
    )


def make_group(
    uid: str, rewards: Sequence[float], batch: int = 1, position: int = 0, attempt: int = 0, version: int = 0
) -> TrajectoryGroup:
    """Sound trajectories with the given rewards."""
    return TrajectoryGroup(
        run_id="test",
        group_uid=uid,
        purpose=Purpose.PURPOSE_TRAIN,
        batch=batch,
        position=position,
        attempt=attempt,
        trajectories=[build_trajectory(uid, i, reward, version=version) for i, reward in enumerate(rewards)],
    )


def save_checkpoint(
    checkpoints: Checkpoints,
    step: int,
    write: Callable[[Path], None],
    consumed: tuple[ConsumedStep, ...] = (),
    parts: Mapping[str, Stateful] | None = None,
) -> Path:
    """A checkpoint that is durable."""
    checkpoints.begin(step, 2, "data", consumed, {"step": step}, write, parts)
    path = checkpoints.wait()
    assert path is not None
    return path


class ScriptedRollout(threading.Thread):
    """A scripted rollout service on a real server: it answers a prompt once its lowest policy version is published.

    Tokens and rewards follow from the prompt, so two runs of a trainer see the same trajectories.
    """

    def __init__(self, redis: RedisSettings, run_id: str, stale: frozenset[str] = frozenset()) -> None:
        """
        Args:
            stale: "batch/position" whose first attempt is answered with trajectories of version 0, whatever is asked.
        """
        super().__init__(daemon=True)
        self._streams = StreamClient(redis, run_id)
        self._ended = threading.Event()
        self._waiting: list[Entry[Prompt]] = []
        self._stale = stale
        self.answered = 0

    def run(self) -> None:
        self._streams.create_groups()
        while not self._ended.is_set():
            self._waiting += self._streams.claim_prompts("scripted", 64, 0.05)
            policy = self._streams.read_policy()
            if policy is None:
                continue
            self._streams.acknowledge_policy("scripted", Replica(serving=policy))
            ready = [entry for entry in self._waiting if self._is_ready(entry.message, policy)]
            self._waiting = [entry for entry in self._waiting if entry not in ready]
            for entry in ready:
                answer = self._answer(entry.message, policy)
                if answer is not None:
                    self._streams.finish(entry, pack_group(answer))
                    self.answered += 1

    def end(self) -> None:
        self._ended.set()
        self.join(WAIT_S)
        assert not self.is_alive(), "it does not end"

    def _is_ready(self, prompt: Prompt, policy: Policy) -> bool:
        return prompt.min_policy_version <= policy.version

    def _answer(self, prompt: Prompt, policy: Policy) -> TrajectoryGroup | None:
        """None leaves the prompt for ever unanswered."""
        late = f"{prompt.batch}/{prompt.position}" in self._stale and prompt.attempt == 0
        version = 0 if late and prompt.purpose == Purpose.PURPOSE_TRAIN else policy.version
        return build_group(
            prompt,
            [
                build_trajectory(
                    prompt.group_uid, i, float((i + prompt.batch) % 2), version, policy.epoch, seed=prompt.sampling.seed
                )
                for i in range(prompt.samples)
            ],
        )


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
