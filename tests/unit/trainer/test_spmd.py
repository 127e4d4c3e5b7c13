"""Rows are sharded over processes, and announcements arrive complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import spmd_process
import torch
from hypothesis import given
from hypothesis import strategies as st

from forage_trainer.data.rows import distribute_rows, scatter_rows, shard_rows
from forage_trainer.data.tensors import pad_jagged
from forage_trainer.engine.spmd import Processes


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
    shares = [shard_rows(batch.data, rank, processes) for rank in range(processes)]
    together = sum(scatter_rows(batch.mask, [(share["row"], pad_jagged(share["response_mask"]))]) for share in shares)
    assert torch.equal(torch.as_tensor(together), batch.mask)
    for share in shares:
        for number, mask in zip(share["row"].tolist(), share["loss_mask"].unbind(), strict=True):
            assert mask.any() == (number >= 0)


def test_an_announcement_arrives_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wire: list[torch.Tensor] = []
    sender, receiver = Processes(0, 1, 60), Processes(0, 1, 60)
    monkeypatch.setattr(sender, "_broadcast", lambda tensor: wire.append(tensor.clone()))
    monkeypatch.setattr(receiver, "_broadcast", lambda tensor: tensor.copy_(wire.pop(0)))
    batch = spmd_process.build_rows(spmd_process.build_settings(tmp_path))
    sent = {
        "batch": batch,
        "advantages": torch.randn(3, 2),
        "empty": torch.zeros(0, 4),
        "old": None,
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
    assert result == {"old": None, "last_position": 2, "folder": tmp_path, "dtype": torch.bfloat16}
    assert torch.equal(rows.mask, batch.mask)
    assert tuple(rows.positions) == batch.positions
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
