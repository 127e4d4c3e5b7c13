"""Rows of a Parquet file as lines of JSON, also for services without pyarrow, which is as large as all their packages.

`python -m forage_runtime.files.parquet_rows FILE` prints the lines; `stream_parquet_rows` runs it in an interpreter
that has pyarrow.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

from forage_runtime.errors import DataError

PARQUET_READER = "FORAGE_PARQUET_PYTHON"
"""Environment variable with an interpreter that has pyarrow; the `forage` command sets it to its own."""

TRAJECTORIES, END_OF_TURN = b"forage.trajectories", b"forage.end_of_turn"
"""Metadata of a file of trajectories: its version, and the text with which the policy's tokenizer ends a turn."""
_BATCH = 1_000


def stream_parquet_rows(file: Path, remedy: str) -> Generator[bytes]:
    """Every row as one line of JSON, read by another process, which ends when the iterator is closed.

    Args:
        remedy: what to do where no interpreter has pyarrow, for the error.

    Raises:
        DataError: the file cannot be read as Parquet, or nothing here can read Parquet.
    """
    python = os.environ.get(PARQUET_READER) or (sys.executable if importlib.util.find_spec("pyarrow") else "")
    if not python:
        raise DataError(f"{file} is Parquet, which needs pyarrow here: {remedy}")
    command = [python, "-m", "forage_runtime.files.parquet_rows", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        try:
            yield from reader.stdout
            problem = reader.stderr.read().decode(errors="replace").strip()
        except GeneratorExit:
            reader.kill()
            raise
    if reader.returncode:
        raise DataError(problem or f"{file} cannot be read as Parquet")


def json_lines(file: Path) -> Iterator[str]:
    """Every row as one line of JSON; values that JSON lacks are written as text, bytes as the text that they encode.

    A row of a file of trajectories is its message alone, in base64, with the file's end of turn.

    Raises:
        DataError: the file does not exist, is not Parquet, or has bytes that are not UTF-8, or a time beyond Python's.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(file)
        metadata = opened.schema_arrow.metadata or {}
        if TRAJECTORIES in metadata:
            end = metadata.get(END_OF_TURN, b"").decode(errors="replace")
            for batch in opened.iter_batches(_BATCH, columns=["trajectory"]):
                for message in batch["trajectory"].to_pylist():
                    row = {"trajectory": base64.b64encode(message).decode(), "end_of_turn": end}
                    yield json.dumps(row) + "\n"
            return
        for batch in opened.iter_batches(_BATCH):
            for row in batch.to_pylist():
                yield json.dumps(row, default=_format_value) + "\n"
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError) as error:  # of a name that is no text, too
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file} cannot be read as Parquet ({reason}): give an existing Parquet file") from None


def _format_value(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # texts of writers that do not mark them as such


def main() -> None:
    try:
        for line in json_lines(Path(sys.argv[1])):
            sys.stdout.write(line)
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
