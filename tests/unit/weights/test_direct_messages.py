"""Messages of the direct transport: read only if nothing in them is wrong."""

from __future__ import annotations

import json
import uuid

import pytest

from forage_weights.direct import Answer, TransferRequest, decode_answer, decode_request


def test_messages_are_checked() -> None:
    request = TransferRequest(uuid.uuid4().hex, (("w", 5),), "127.0.0.1:1", "GPU-0", ("127.0.0.1:2",))
    assert decode_request(request.encode()) == request
    answer = Answer(1 << 20, is_busy=True, peer="127.0.0.1:1", backend="nccl")
    assert decode_answer(answer.encode()) == answer
    for field, value in (
        ("uid", "x" * 32),
        ("files", []),
        ("files", [["w", -1]]),
        ("files", [["w", "1"]]),
        ("serves", "http://x"),
        ("serves", None),
        ("gpu", 0),
        ("failed", "x"),
        ("is_done", 1),
    ):
        with pytest.raises(ValueError, match=r"lacks a field|names the file|no host:port"):
            decode_request(json.dumps(json.loads(request.encode()) | {field: value}).encode())
    for field, value in (
        ("piece_bytes", 1),
        ("piece_bytes", 1 << 40),
        ("peer", "x"),
        ("backend", "mpi"),
        ("refused", 1),
    ):
        with pytest.raises(ValueError, match=r"lacks a field|no host:port"):
            decode_answer(json.dumps(json.loads(answer.encode()) | {field: value}).encode())
