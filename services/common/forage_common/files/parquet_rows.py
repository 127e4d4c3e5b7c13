"""`python -m forage_common.files.parquet_rows FILE`: a Parquet file as lines of JSON, for services without pyarrow."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from forage_common.errors import DataError

_BATCH = 1_000


def json_lines(file: Path) -> Iterator[str]:
    """Every row as one line of JSON; values that JSON lacks become their text.

    Raises:
        DataError: not a Parquet file, or one that cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches(_BATCH):
            for row in batch.to_pylist():
                yield json.dumps(row, default=str) + "\n"
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file} cannot be read as Parquet ({reason}): give an existing Parquet file") from None


def main() -> None:
    try:
        for line in json_lines(Path(sys.argv[1])):
            sys.stdout.write(line)
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
