"""Groups that were kept are taken again only if their file is, to the bit, what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.proto import serialize_length_prefixed

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_queue.trainer.batcher import Batch
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_runtime.errors import DataError


def test_a_file_with_other_groups_than_were_written_is_damaged(tmp_path: Path) -> None:
    kept = ReplayGroups(tmp_path)
    kept.write(Batch(3, (), stale=0))
    (file,) = tmp_path.iterdir()
    assert kept.read(3).groups == []
    with file.open("wb") as stream:
        serialize_length_prefixed(PackedGroup(), stream)
    with pytest.raises(DataError, match=r"packed_3\.[0-9a-f]{64} is damaged"):
        kept.read(3)
