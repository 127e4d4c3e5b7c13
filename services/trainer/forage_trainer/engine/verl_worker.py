"""One of verl's training workers in this process, as part of all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    import forage_trainer.engine.cpu_engine  # noqa: F401  (registers the CPU platform and engines)

from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric.utils import Metric
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from forage_trainer.data.rows import Rows, by_row, share_of
from forage_trainer.data.tensors import select
from forage_trainer.engine.spmd import Processes

Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]
_NAN = float("nan")


class VerlWorker:
    """A model with its engine and, unless it is forward only, its optimizer.

    Every process gets all rows and computes its share of them; results are those of all rows, on every process.
    """

    def __init__(
        self,
        kind: str,
        model: HFModelConfig,
        engine: FSDPEngineConfig,
        optimizer: FSDPOptimizerConfig | None,
        processes: Processes,
    ) -> None:
        """
        Args:
            kind: language_model or value_model.
        """
        self._processes = processes
        self._worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type=kind,
                model_config=model,
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(),
            )
        )
        self._worker.reset()

    @property
    def engine(self) -> Any:
        """verl's engine, which has the model in `module`."""
        return self._worker.engine

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(parameter.numel() for parameter in self.engine.module.parameters())

    def set_loss(self, loss: Loss) -> None:
        """What `update` minimises."""
        self._worker.set_loss_fn(loss)

    def infer(self, batch: Rows, name: str, **how: Any) -> torch.Tensor:
        """`name` (log_probs or values) of the response tokens, (rows, tokens); 0 after a row's end.

        Args:
            how: of verl's `infer_batch`.
        """
        data = self._share(batch.data)
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False, **how)
        found = tu.get(self._worker.infer_batch(data), name)
        response = no_padding_2_padding(found, data)
        return self._processes.sum(by_row(batch.mask, [(data["row"], response)]))

    def update(self, data: TensorDict, rows: Sequence[int], **how: Any) -> dict[str, float]:
        """One update on the given rows; figures under verl's names.

        Args:
            how: of verl's `train_batch` and of the loss.
        """
        share = self._share(select(data, rows))
        tu.assign_non_tensor(share, global_batch_size=len(rows), **how)
        return _plain(tu.get(self._worker.train_batch(share), "metrics"))

    def save(self, folder: Path, step: int) -> None:
        """verl's checkpoint: model, optimizer, learning-rate schedule and random state of every process."""
        self._worker.save_checkpoint(str(folder), global_step=step)

    def load(self, folder: Path) -> None:
        """Read back what `save` wrote, with as many processes."""
        self._worker.load_checkpoint(str(folder))

    def _share(self, data: TensorDict) -> TensorDict:
        return share_of(data.copy(), self._processes.rank, self._processes.size)


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return sum(values) / len(values) if values else _NAN


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics of one update (numbers, `Metric`s, or lists of them by process and micro-batch) as numbers."""
    numbers = {}
    for name, value in metrics.items():
        values = (
            [v for part in value for v in (part if isinstance(part, list) else [part])]
            if isinstance(value, list)
            else [value]
        )
        if values and isinstance(values[0], Metric):
            numbers[name] = float(Metric.aggregate_dp(values))
        else:
            numbers[name] = mean([float(v) for v in values])
    return numbers
