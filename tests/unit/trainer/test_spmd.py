"""Rows are sharded over processes, and announcements arrive complete."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
import spmd_process
import torch
from hypothesis import given
from hypothesis import strategies as st
from limits import WAIT_S

from forage_trainer.data.rows import build_share, distribute_rows, scatter_rows
from forage_trainer.data.tensors import pad_jagged
from forage_trainer.engine.spmd import Processes
from forage_trainer.engine.verl_worker import collect, hand_out
from forage_trajectory.trajectory import Columns


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 8))
def test_every_row_is_distributed_once_and_processes_get_equally_many(lengths: list[int], processes: int) -> None:
    shares = distribute_rows(lengths, processes)
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for row in share if row >= 0) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in share if row >= 0) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 9])
def test_shards_add_up_to_the_batch(processes: int, tmp_path: Path) -> None:
    batch = spmd_process.build_rows(spmd_process.build_settings(tmp_path))
    shares = [build_share(batch, range(len(batch)), rank, processes) for rank in range(processes)]
    parts = [(share["row"], pad_jagged(share["response_mask"])) for share in shares]
    assert torch.equal(scatter_rows(batch.shape, parts), batch.mask)
    for share in shares:
        for number, mask in zip(share["row"].tolist(), share["loss_mask"].unbind(), strict=True):
            assert mask.any() == (number >= 0)


def test_an_announcement_arrives_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wire: list[torch.Tensor] = []
    sender, receiver = (Processes(0, 1, 60, tmp_path / name) for name in ("columns", "unused"))
    monkeypatch.setattr(sender, "_broadcast", lambda tensor: wire.append(tensor.clone()))
    monkeypatch.setattr(receiver, "_broadcast", lambda tensor: tensor.copy_(wire.pop(0)))
    batch = spmd_process.build_rows(spmd_process.build_settings(tmp_path))
    sent = {
        "batch": batch,
        "advantages": torch.randn(3, 2),
        "empty": torch.zeros(0, 4),
        "old": None,
        "reference": torch.zeros(batch.shape),
        "last_position": 2,
        "folder": tmp_path,
        "dtype": torch.bfloat16,
    }
    sender.announce("update", sent)
    method, result = receiver.receive()
    rows = result.pop("batch")
    assert method == "update"
    assert torch.equal(result.pop("advantages"), sent["advantages"])
    assert result.pop("empty").shape == (0, 4)
    assert result.pop("reference").shape == (0,), "values of all rows are handed out by the call itself"
    assert result == {"old": None, "last_position": 2, "folder": tmp_path, "dtype": torch.bfloat16}
    assert tuple(rows.positions) == batch.positions
    assert list((tmp_path / "columns").rglob("*")) != []
    assert not any(isinstance(one, Columns) for one in rows.columns), "no tokens are sent"
    assert set(rows.data.keys()) == set(batch.data.keys())
    for name in batch.data.keys():  # noqa: SIM118
        one, other = rows.data[name], batch.data[name]
        if isinstance(other, torch.Tensor) and other.is_nested:
            assert torch.equal(one.offsets(), other.offsets())
            one, other = one.values(), other.values()
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
    sender.announce("values", {"batch": batch})
    assert len(wire) == 2
    assert receiver.receive()[1]["batch"] is rows
    sender.announce(None, {})
    assert receiver.receive() == (None, {})


class Wire(Processes):
    """One of several processes in this one: what is sent waits in queues."""

    def __init__(self, rank: int, size: int, folder: Path, queues: dict[tuple[int, int], Queue[torch.Tensor]]) -> None:
        super().__init__(rank, 1, 60, folder)
        self.size = size
        self._queues = queues

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._queues[self.rank, rank].put(tensor.clone())

    def receive_from(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        found = self._queues[rank, self.rank].get(timeout=WAIT_S)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        return tensor.copy_(found)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_every_process_gets_the_values_of_its_rows_and_rank_0_all_results(size: int, tmp_path: Path) -> None:
    """Nine processes have fewer rows than processes: the shortest one fills the gaps and counts once."""
    batch = spmd_process.build_rows(spmd_process.build_settings(tmp_path))
    updates = [[0, 1, 2, 3], [4, 5, 6]]
    given_ = torch.arange(batch.mask.numel(), dtype=torch.float32).view(batch.shape) + 1
    queues = {(one, other): Queue[torch.Tensor]() for one in range(size) for other in range(size)}
    inside = torch.arange(batch.shape[1]) < torch.tensor(batch.responses)[:, None]

    def call(rank: int) -> list[torch.Tensor]:
        processes, results = Wire(rank, size, tmp_path, queues), []
        values = {"own": given_ if rank == 0 else torch.empty(0), "none": None}
        own = hand_out(processes, batch, updates, values)
        assert own.keys() == {"own"}
        for rows in [*updates, range(len(batch))]:
            share = build_share(batch, rows, rank, size, own if rows in updates else {"own": given_})
            results.append(collect(processes, batch, [(share["row"], pad_jagged(share["own"]))]))
        return results

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(call, range(size)))
    for rows, result in zip([*updates, range(len(batch))], results[0], strict=True):
        expected = torch.zeros(batch.shape)
        expected[list(rows)] = (given_ * inside)[list(rows)]
        assert torch.equal(result, expected)
    assert all(one.shape == (0,) for others in results[1:] for one in others)
