"""Models on ONNX Runtime: exported once by a child process, run over texts in groups of similar length."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from forage_retriever import artifacts
from forage_retriever.encoders import model_folder
from forage_runtime.errors import UserError
from forage_runtime.settings import EncoderPrecision
from forage_runtime.text.characters import replace_halves

MODEL_FILE = "model.onnx"
EXPORT_RECIPE = "onnx-fp32/2"
INT8_RECIPE = "onnx-int8/1"
"""Change whenever a graph exported by older code cannot be used."""

RUN_RECIPE = "onnx-run/1"
"""Changes whenever texts are fed to a graph in another way."""

MAX_CHARS = 8192
"""Limit of a text before tokenization; characters beyond it cannot be among the tokens that are kept."""

LENGTH_STEP = 4
TOKEN_BUDGET = 512
"""Tokens of one run, so that the states of a layer stay in a core's cache."""

_CPU_INFO = Path("/proc/cpuinfo")
_EXPORT_TIMEOUT_S = 900


class ExportError(UserError):
    """The model cannot be exported to ONNX."""


def export_model(
    source: Path, digest: str, cache_dir: Path, precision: EncoderPrecision, threads: int, command: str, *options: str
) -> Path:
    """The folder with the graph and tokenizer of a model, exported first if it was not exported before.

    Args:
        digest: of the model.
        command: of `onnx_export`, with its options.

    Raises:
        ExportError: torch cannot export the model, or the graph's output differs.
        UserError: the folder is not a model, or the cache cannot be written.
    """
    fp32 = artifacts.compute_digest(EXPORT_RECIPE, command, *options, digest)

    def export(folder: Path) -> None:
        _run_export(threads, command, str(source), str(folder), *options)

    def quantize(folder: Path) -> None:
        _run_export(threads, "int8", str(artifacts.build_once(cache_dir, command, fp32, export)), str(folder))

    if precision is EncoderPrecision.FP32:
        return artifacts.build_once(cache_dir, command, fp32, export)
    return artifacts.build_once(cache_dir, command, artifacts.compute_digest(INT8_RECIPE, fp32), quantize)


class OnnxModel:
    """A graph and its tokenizer. The output of a text is bit-identical whatever the other texts of a call."""

    def __init__(self, folder: Path, max_tokens: int, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # it would keep a plan for every shape
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not _has_vnni():  # sums of int8 products could overflow; preventing it halves the speed
            options.add_session_config_entry("session.x64quantprecision", "1")
        try:
            self._session = onnxruntime.InferenceSession(
                str(folder / MODEL_FILE), options, providers=["CPUExecutionProvider"]
            )
            self._tokenizer = Tokenizer.from_file(str(folder / model_folder.TOKENIZER_FILE))
        except Exception as error:  # noqa: BLE001 - both libraries raise bare Exception on a damaged file; reported to the user
            raise UserError(f"model {folder} cannot be read ({error}): delete this folder and start again") from None
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.no_padding()
        self._max_tokens = max_tokens
        self._inputs = {entry.name for entry in self._session.get_inputs()}
        self.output_shape: tuple[int, ...] = tuple(self._session.get_outputs()[0].shape[1:])

    def run(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """The graph's outputs [len(texts), …] for texts or pairs of texts."""
        outputs: NDArray[np.float32] = np.empty((len(texts), *self.output_shape), np.float32)
        encodings = self._tokenizer.encode_batch_fast([_truncate_text(text) for text in texts])
        for length, rows in group_by_length([len(encoding) for encoding in encodings], self._max_tokens):
            outputs[rows] = self._session.run(None, self._feed([encodings[row] for row in rows], length))[0]
        return outputs

    def _feed(self, encodings: Sequence[Encoding], length: int) -> dict[str, NDArray[np.int64]]:
        feed: dict[str, NDArray[np.int64]] = {
            name: np.zeros((len(encodings), length), np.int64) for name in self._inputs
        }
        for row, encoding in enumerate(encodings):
            count = len(encoding)
            feed["input_ids"][row, :count] = encoding.ids
            feed["attention_mask"][row, :count] = 1
            if "token_type_ids" in feed:
                feed["token_type_ids"][row, :count] = encoding.type_ids
        return feed


def group_by_length(lengths: Sequence[int], max_length: int) -> Iterator[tuple[int, list[int]]]:
    """Rows that run together, and the length to which they are padded.

    That length depends on a text alone, not on the other texts, so they cannot change the order of a sum; and little of
    a group is padding.
    """
    rows_of: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        padded = min(-(-max(length, 1) // LENGTH_STEP) * LENGTH_STEP, max_length)
        rows_of.setdefault(padded, []).append(row)
    for padded, rows in sorted(rows_of.items()):
        size = max(1, TOKEN_BUDGET // padded)
        for begin in range(0, len(rows), size):
            yield padded, rows[begin : begin + size]


def _has_vnni() -> bool:
    try:
        return "vnni" in _CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return False


def _truncate_text(text: str | tuple[str, str]) -> str | tuple[str, str]:
    # The tokenizer refuses lone surrogates, which Python's strings may hold.
    if isinstance(text, str):
        return replace_halves(text[:MAX_CHARS])
    first, second = text
    return replace_halves(first[:MAX_CHARS]), replace_halves(second[:MAX_CHARS])


def _run_export(threads: int, *arguments: str) -> None:
    # Torch stays out of this process. The child exits when its standard input closes, that is, with this process.
    command = [sys.executable, "-m", "forage_retriever.encoders.onnx_export", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment) as child,
    ):
        try:
            child.wait(_EXPORT_TIMEOUT_S)  # wait: has a time limit
        except subprocess.TimeoutExpired:
            child.kill()
            raise ExportError(
                f"model {arguments[1]} was not exported within {_EXPORT_TIMEOUT_S} s: use a smaller one"
            ) from None
        log.seek(0)
        last = (log.read().strip().splitlines() or ["no output"])[-1]
    if child.returncode != 0:
        raise ExportError(
            f"model {arguments[1]} cannot be exported to ONNX ({last}): give another, or serve it with"
            " text-embeddings-inference and set its url instead"
        )
