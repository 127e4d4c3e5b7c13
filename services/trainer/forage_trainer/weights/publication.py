"""A run's policies on their way to the engines: from the worker to an announcement, and again where one is refused.

What is published is a copy of the policy's weights in the type that the engines compute in, so that no byte is sent
which an engine rounds away, and its log-probabilities of a few tokens. By these an engine can tell whether it serves
what was trained (`rollout.weights.canary`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from forage_proto.v1.trajectory_pb2 import Canary, Policy
from forage_queue.streams.client import StreamClient
from forage_runtime.files.served_lora import get_served_lora_rank
from forage_runtime.retries import Retries
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import Settings
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_trainer.data.tensors import Rows
from forage_trajectory.trajectory import Columns, Group
from forage_weights.announcement import CANARY_ROWS, CANARY_TOKENS
from forage_weights.trainer.model_files import Adapter
from forage_weights.trainer.publisher import PolicyStore, Publisher
from forage_weights.trainer.refusals import Refusals

_LEAST = 2
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""By the names of the settings, which are vLLM's, and of PyTorch."""


class Publication:
    """Publishes the worker's policy, at once or on a thread beside the next step.

    Args:
        hold: entered while the worker is asked: it may share its GPUs.
        openings, pad_id: as of `Snapshots`.

    Attributes:
        has_begun: whether the run had published a policy when this process began.
        announced: the version that was announced last; the one before it while the last one is on its way.

    Raises:
        UserError: as `Publisher.open`.
    """

    def __init__(
        self,
        settings: Settings,
        streams: StreamClient,
        worker: Worker,
        retries: Retries,
        health: Health,
        hold: Callable[[], AbstractContextManager[Any]],
        signatures: RunSignatures,
        openings: Sequence[Sequence[int]],
        pad_id: int,
    ) -> None:
        self._streams, self._retries = streams, retries
        folder, uri = settings.run.folder / "policies", settings.trainer.publish.uri
        self.has_begun = any(folder.glob("v*"))
        self._store = PolicyStore(folder, uri, settings.run.id, retries.storage)
        self._publisher = Publisher.open(settings, self._store, streams, retries, signatures)
        self._snapshots = Snapshots(
            settings, worker, partial(retries.redis, streams.read_dtype), hold, openings, pad_id
        )
        self._refusals = Refusals(streams, retries.redis, health)
        self._newest = 0
        self.announced = 0

    def find_highest_epoch(self) -> int:
        """See `PolicyStore.find_highest_epoch`."""
        return self._store.find_highest_epoch()

    def add_turn(self, groups: Iterable[Group]) -> None:
        """See `Snapshots.add_turn`."""
        self._snapshots.add_turn(groups)

    def publish(self, version: int, whole: bool = False) -> Policy:
        """Publish the policy and return once it is announced; raises as `Publisher.publish`."""
        self._newest = version
        policy = self._publisher.publish(version, *self._snapshots.take(), whole)
        self.announced = version
        return policy

    def begin(self, version: int) -> Policy:
        """Publish the policy on a thread; returns what is known of it. The one before must be announced.

        Raises:
            FencedError: a newer trainer has taken over.
        """
        self._newest = version
        self._retries.redis(self._streams.check_epoch)
        self._publisher.begin(version, *self._snapshots.take())
        return Policy(version=version, epoch=self._streams.epoch)

    def poll(self) -> Policy | None:
        """See `Publisher.poll`."""
        return self._note(self._publisher.poll())

    def wait(self) -> Policy | None:
        """See `Publisher.wait`."""
        return self._note(self._publisher.wait())

    def _note(self, policy: Policy | None) -> Policy | None:
        if policy is not None:
            self.announced = policy.version
        return policy

    def check_refusals(self) -> None:
        """See `Refusals.check`."""
        self._refusals.check()

    @property
    def canary_diff(self) -> float | None:
        """See `Refusals.canary_diff`."""
        return self._refusals.canary_diff

    def mend(self) -> None:
        """While no groups come: announce the last policy again if the server has lost it, publish it again if the
        engines cannot load it. One that is on its way is left alone: what holds it up is named by its own waits."""
        if self.announced < self._newest:
            return
        self._publisher.announce_again()
        if self._publisher.is_damaged() or self._refusals.is_to_be_published_again():
            # An engine that starts now could not load it, and without engines no later policy would take its place.
            get_logger().warning("policy_published_again", version=self._newest)
            self.publish(self._newest, whole=True)

    def close(self) -> None:
        """See `Publisher.close`."""
        self._publisher.close()


class Worker(Protocol):
    """What holds the policy, and computes with it. dtype: what it computes in, as PyTorch names it."""

    @property
    def dtype(self) -> str: ...

    def weights(self, dtype: torch.dtype) -> Mapping[str, torch.Tensor]: ...

    def adapter(self, dtype: torch.dtype) -> Adapter: ...

    def log_probs(self, batch: Rows) -> torch.Tensor: ...


class Snapshots:
    """Takes snapshots of a worker's policy.

    Args:
        read_dtype: what the engines say that they compute in; see `choose_dtype`.
        hold: entered while the worker is asked: it may share its GPUs.
        openings: tokens of some prompts, to make rows of; none: no log-probabilities are published.
        pad_id: token id for padding inside the worker.
    """

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        read_dtype: Callable[[], str],
        hold: Callable[[], AbstractContextManager[Any]],
        openings: Sequence[Sequence[int]],
        pad_id: int,
    ) -> None:
        self._settings, self._worker, self._read_dtype, self._hold = settings, worker, read_dtype, hold
        # The ends of prompts: their beginnings are the same in all.
        self._tokens = [[*opening[-CANARY_TOKENS:]] for opening in openings[:CANARY_ROWS] if len(opening) >= _LEAST]
        self._pad_id = pad_id
        self._rows = self._build_rows()
        self._has_turn = False

    def add_turn(self, groups: Iterable[Group]) -> None:
        """Let the last row be a turn that the policy has sampled, the first one that there is."""
        if self._has_turn or self._rows is None:
            return
        for trajectory in (one for group in groups for one in group.trajectories):
            if trajectory.counts.whole and (turn := _find_turn(trajectory.columns.load())):
                self._tokens, self._has_turn = [*self._tokens[: CANARY_ROWS - 1], turn], True
                self._rows = self._build_rows()
                return

    def take(self) -> tuple[Mapping[str, torch.Tensor] | Adapter, Canary | None]:
        """Copy what is to be published to the CPU, and score the rows under it.

        The copy is of the whole policy, or of its adapter where engines serve it.
        """
        worker, is_adapter = self._worker, get_served_lora_rank(self._settings) > 0
        with self._hold():
            dtype = choose_dtype(self._settings, self._read_dtype())
            return worker.adapter(dtype) if is_adapter else worker.weights(dtype), self._score(dtype)

    def _score(self, published: torch.dtype) -> Canary | None:
        """Score the rows under the weights as they are; the canary names the type they are published in if coarser.

        None without rows, and where a log-probability is not finite: no engine could be measured by it.
        """
        if self._rows is None:
            return None
        scores = self._worker.log_probs(self._rows)
        coarsest = max(_DTYPES[self._worker.dtype], published, key=lambda one: torch.finfo(one).eps)
        canary = Canary(dtype=str(coarsest).removeprefix("torch."))
        for tokens, scored in zip(self._tokens, scores.tolist(), strict=True):
            canary.rows.add(token_ids=tokens, logprobs=scored[: len(tokens) - 1])
        if not all(math.isfinite(one) for row in canary.rows for one in row.logprobs):
            get_logger().warning("canary_left_out", reason="the policy's log-probabilities are not finite")
            return None
        return canary

    def _build_rows(self) -> Rows | None:
        if not self._tokens:
            return None
        sizes = [len(tokens) - 1 for tokens in self._tokens]
        return Rows(
            columns=[_make_columns(tokens) for tokens in self._tokens],
            prompts=[1] * len(sizes),
            responses=sizes,
            temperatures=[1.0] * len(sizes),
            positions=[*range(len(sizes))],
            pad_id=self._pad_id,
            state_masking=True,
        )


def _make_columns(tokens: Sequence[int]) -> Columns:
    """A row whose first token is its prompt."""
    runs = np.array([[len(tokens) - 1, 1, 1]], np.int32)
    return Columns(np.array(tokens, np.int32), runs, np.zeros(len(tokens) - 1, np.float32))


def _find_turn(columns: Columns) -> list[int]:
    """The first tokens of the first run that the policy sampled and that has several; empty: there is none."""
    end = len(columns.token_ids) - int(columns.runs[:, 0].sum())
    for length, sampled, _ in columns.runs.tolist():
        begin, end = end, end + length
        if sampled and length >= _LEAST:
            tokens: list[int] = columns.token_ids[begin:end][:CANARY_TOKENS].tolist()
            return tokens
    return []


def choose_dtype(settings: Settings, declared: str) -> torch.dtype:
    """Choose the type of the next published policy.

    It is the first one of these that names a type: `trainer.publish.dtype`, `rollout.engine.dtype`, what the engines
    say that they compute in, and the model's configuration. Only before the first engine of a run has started is that
    last one asked: the policy is then the initial one, which loses nothing in the type that it has.

    Args:
        declared: what the engines say; empty before any did.
    """
    named = (settings.trainer.publish.dtype, settings.rollout.engine.dtype, declared)
    return next((_DTYPES[name] for name in named if name in _DTYPES), None) or _read_model_dtype(settings.model.path)


def _read_model_dtype(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))), torch.float32)
