"""A file of a group counts only if it is, to the bit, what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_queue.streams.payloads import PayloadLostError, Payloads
from forage_runtime.settings import load_settings


@pytest.mark.parametrize("columns", [b"swapped!", b"longer than before"])
def test_another_groups_content_is_not_taken_for_this_one(tmp_path: Path, columns: bytes) -> None:
    payloads = Payloads(load_settings(None, [f"run.dir={tmp_path}", "run.id=run"]))
    stored = payloads.put("trajectories", "0" * 16, PackedGroup(columns=b"original"))
    assert stored is not None
    (file,) = (tmp_path / "run/groups/trajectories").iterdir()
    content = file.read_bytes()
    file.write_bytes(PackedGroup(columns=columns).SerializeToString())
    with pytest.raises(PayloadLostError, match="is not what was written"):
        payloads.fetch("trajectories", PackedGroup.FromString(stored.SerializeToString()))
    file.write_bytes(content)
    payloads.fetch("trajectories", stored)
    assert stored.columns == b"original"
