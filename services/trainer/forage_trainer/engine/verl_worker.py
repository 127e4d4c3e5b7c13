"""One of verl's training workers: this process's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

if torch.cuda.is_available():
    import forage_trainer.engine.gpu_engine
else:
    import forage_trainer.engine.cpu_engine  # noqa: F401  (registers the CPU platform and engines)

from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric.utils import Metric
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from forage_trainer.data.rows import build_share, scatter_rows, share_rows
from forage_trainer.data.tensors import NO_ROW, Rows, RowValues
from forage_trainer.engine import engine_state
from forage_trainer.engine.spmd import Processes

Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]
_NAN = float("nan")


class VerlWorker:
    """A model with its engine and, unless it is forward-only, its optimizer.

    Every process reads and computes its share of the rows. Rank 0 returns the results of all rows, others an empty one.
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
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.engine.module.parameters())

    def copy_buffers(self, other: VerlWorker) -> None:
        """Take over the buffers of a worker with the same model, such as the frequencies of rotary positions.

        verl casts them to the type of the model; in bf16 the angles of late positions would be wrong by radians.
        """
        pairs = zip(self.engine.module.named_buffers(), other.engine.module.named_buffers(), strict=True)
        for (_, buffer), (_, exact) in pairs:
            buffer.data = exact.detach().to(buffer.device, copy=True)

    def set_loss(self, loss: Loss) -> None:
        """Set the loss that `update` minimizes."""
        self._worker.set_loss_fn(loss)

    def move(self, device: str) -> None:
        """Move parameters, gradients and optimizer; parameters that PyTorch offloads by itself stay on the host.

        Args:
            device: "device" or "cpu", as verl names them.
        """
        engine = self.engine
        if engine._uses_fsdp2_cpu_offload_policy:
            return
        self._worker.to(device)
        if engine.engine_config.forward_only:  # which verl does not move
            engine.module.to("cpu" if device == "cpu" else get_device_id(), non_blocking=True)

    def infer(self, batch: Rows, name: str, **options: Any) -> torch.Tensor:
        """Compute `name` (log_probs, entropy or values) of the response tokens, (rows, tokens); 0 after a row's end.

        Args:
            options: of verl's `infer_batch`.
        """
        (result,) = self.infer_together(batch, name, **options)
        return result

    def infer_together(self, batch: Rows, *names: str, **options: Any) -> tuple[torch.Tensor, ...]:
        """Compute what is named in one pass, each as `infer` does.

        Args:
            options: of verl's `infer_batch`.
        """
        data = build_share(batch, range(len(batch)), self._processes.rank, self._processes.size)
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy="entropy" in names, **options)
        output = self._worker.infer_batch(data)
        responses = [no_padding_2_padding(tu.get(output, name), data) for name in names]
        return tuple(collect(self._processes, batch, [(data["row"], part)]) for part in responses)

    def update(
        self, batch: Rows, rows: Sequence[int], values: Mapping[str, RowValues], **options: Any
    ) -> dict[str, float]:
        """Take one update on the given rows; returns metrics under verl's names.

        Args:
            values: further fields of the loss, of the rows of this process's share: see `hand_out`.
            options: of verl's `train_batch` and of the loss.
        """
        trained = sum(map(batch.is_trained, rows))
        shard = build_share(batch, rows, self._processes.rank, self._processes.size, values)
        tu.assign_non_tensor(shard, global_batch_size=trained, **options)
        return _to_numbers(tu.get(self._worker.train_batch(shard), "metrics"))

    def save(self, folder: Path) -> None:
        """Write the state of model, optimizer, learning-rate schedule and random numbers, each process its part."""
        engine_state.save_engine(self.engine, folder, self._processes.rank)
        self._processes.meet()

    def load(self, folder: Path) -> None:
        """Load a state of `save` by any number of processes.

        Raises:
            DataError: it is of another model, or not complete.
        """
        engine_state.load_engine(self.engine, folder, self._processes.rank)
        self._processes.meet()


def hand_out(
    processes: Processes, batch: Rows, updates: Sequence[Sequence[int]], values: Mapping[str, torch.Tensor | None]
) -> dict[str, RowValues]:
    """Give every process what rank 0 knows of the rows of its shares.

    Args:
        updates: the rows of each update.
        values: (rows, tokens) each, on rank 0; anywhere else tensors of the same types. None is left out.
    """
    present = {name: value for name, value in values.items() if value is not None}
    if processes.size == 1:
        return dict[str, RowValues](present)

    def list_rows(rank: int) -> list[int]:
        return sorted({row for rows in updates for row in share_rows(batch, rows, rank, processes.size)[0]})

    if processes.rank == 0:
        for rank in range(1, processes.size):
            rows = list_rows(rank)
            for value in present.values():
                processes.send(torch.cat([value[row, : batch.responses[row]] for row in rows]), rank)
        return dict[str, RowValues](present)
    rows = list_rows(processes.rank)
    sizes = [batch.responses[row] for row in rows]
    own: dict[str, RowValues] = {}
    for name, value in present.items():
        parts = processes.receive_from(0, torch.empty(sum(sizes), dtype=value.dtype)).split(sizes)
        own[name] = dict(zip(rows, parts, strict=True))
    return own


def collect(processes: Processes, batch: Rows, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Collect values over the response that every process has computed for its rows.

    Args:
        parts: (row numbers, values) of this process; values have a row for each number, padded.

    Returns:
        (rows, tokens) on rank 0, 0 after a row's end; an empty tensor anywhere else.
    """
    if processes.rank == 0:
        received = [_receive_rows(processes, batch, rank) for rank in range(1, processes.size)]
        return scatter_rows(batch.shape, [*parts, *(part for rank in received for part in rank)])
    numbers: list[int] = []
    flat: list[torch.Tensor] = []
    for rows, values in parts:
        real = [(index, row) for index, row in enumerate(rows.tolist()) if row != NO_ROW]
        numbers += [row for _, row in real]
        known = values.detach().float().cpu()
        flat += [known[index, : batch.responses[row]] for index, row in real]
    processes.send(torch.tensor(len(numbers)), 0)
    if numbers:
        processes.send(torch.tensor(numbers), 0)
        processes.send(torch.cat(flat), 0)
    return torch.empty(0)


def _receive_rows(processes: Processes, batch: Rows, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    count = int(processes.receive_from(rank, torch.tensor(0)))
    if not count:
        return []
    rows = processes.receive_from(rank, torch.empty(count, dtype=torch.long))
    sizes = [batch.responses[row] for row in rows.tolist()]
    parts = processes.receive_from(rank, torch.empty(sum(sizes))).split(sizes)
    return [(row[None], part[None]) for row, part in zip(rows, parts, strict=True)]


def mean(values: Sequence[float]) -> float:
    """Mean of the values; NaN without any."""
    return sum(values) / len(values) if values else _NAN


def _to_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Reduce verl's metrics of one update (numbers, `Metric`s, or lists of them) to numbers."""
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
