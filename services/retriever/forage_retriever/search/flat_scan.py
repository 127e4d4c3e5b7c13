"""Exact search of large flat indexes by ONNX Runtime's matrix product.

BLAS copies both factors of a product into its own layout, which is most of the work for few queries; ONNX Runtime reads
the vectors in place. CPU milliseconds per query over 200,000 vectors of 384 dimensions, 32 and 64 queries at a time:
FAISS by default 16.7 and 16.6, FAISS with BLAS 2.9 and 2.2, numpy's product with a partial sort 4.3 and 3.3, this
module 2.2 and 2.0.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
from numpy.typing import NDArray

MIN_ROWS = 100_000
"""Below this size FAISS is as fast."""

MIN_QUERIES = 4
"""Below this batch size FAISS reads all vectors once per query, and is no slower."""

_BLOCK_ROWS = 8192
_OPSET, _IR_VERSION = 17, 9


class FlatScan:
    """Scans all vectors [passages, dimension] of an index, without a copy. Thread-safe."""

    def __init__(self, vectors: NDArray[np.float32], threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._vectors = vectors
        self._session = onnxruntime.InferenceSession(_build_graph(), options, providers=["CPUExecutionProvider"])

    def search(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and rows [n, k] of the greatest inner products with queries [n, dimension]; ties by row."""
        columns = np.ascontiguousarray(queries.T)
        best: NDArray[np.float32] = np.empty((0, len(queries)), np.float32)
        rows: NDArray[np.int64] = np.empty((0, len(queries)), np.int64)
        for begin in range(0, len(self._vectors), _BLOCK_ROWS):
            block = self._vectors[begin : begin + _BLOCK_ROWS]
            block_k = np.array([min(k, len(block))], np.int64)
            scores, places = self._session.run(None, {"vectors": block, "queries": columns, "k": block_k})
            best, rows = np.concatenate([best, scores]), np.concatenate([rows, places + begin])
            order = np.argsort(-best, axis=0, kind="stable")[:k]
            best, rows = np.take_along_axis(best, order, 0), np.take_along_axis(rows, order, 0)
        return best.T, rows.T


def _build_graph() -> bytes:
    """The graph `scores, rows = TopK(vectors x queries, k)`, along the vectors."""
    from onnx import TensorProto, helper

    inputs = [
        helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["rows", "dimension"]),
        helper.make_tensor_value_info("queries", TensorProto.FLOAT, ["dimension", "count"]),
        helper.make_tensor_value_info("k", TensorProto.INT64, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["k", "count"]),
        helper.make_tensor_value_info("rows", TensorProto.INT64, ["k", "count"]),
    ]
    nodes = [
        helper.make_node("MatMul", ["vectors", "queries"], ["products"]),
        helper.make_node("TopK", ["products", "k"], ["scores", "rows"], axis=0),
    ]
    graph = helper.make_graph(nodes, "scan", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    content: bytes = model.SerializeToString()
    return content
