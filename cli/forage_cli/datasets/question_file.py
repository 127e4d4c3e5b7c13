"""Files of questions: Parquet in the Search-R1 layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forage_records.questions import Questions, read_questions
from forage_runtime.files import durable
from forage_runtime.text.terminal import echo

TEXT, NUMBER = pa.string(), pa.int64()
TEXTS, NUMBERS = pa.list_(TEXT), pa.list_(NUMBER)


def read_and_warn(files: Iterable[Path]) -> Questions:
    """Read the questions of all files, and warn on stderr of accepted answers that match nothing.

    Raises:
        DataError: see `read_questions`.
    """
    questions = read_questions(files)
    if wordless := questions.describe_wordless():
        echo(f"warning: {wordless}", err=True)
    return questions


def make_question_row(source: str, prompt: str, ability: str, truth: Mapping[str, Any], info: Any) -> dict[str, Any]:
    """Make the row of a question, whose prompt is one message of the user."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": info,
    }


def write_question_rows(
    file: Path,
    rows: Iterable[dict[str, Any]],
    truth: Mapping[str, pa.DataType],
    info: Mapping[str, pa.DataType],
    batch: int = 10_000,
) -> int:
    """Write the rows, with `batch` of them in memory at a time; returns their number.

    Args:
        truth: fields of `reward_model.ground_truth`.
        info: fields of `extra_info`.
    """
    schema = pa.schema(
        [
            ("data_source", TEXT),
            ("prompt", pa.list_(pa.struct([("role", TEXT), ("content", TEXT)]))),
            ("ability", TEXT),
            ("reward_model", pa.struct([("style", TEXT), ("ground_truth", pa.struct(list(truth.items())))])),
            ("extra_info", pa.struct(list(info.items()))),
        ]
    )
    source = iter(rows)
    count = 0
    with durable.stage_file(file) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        while part := list(islice(source, batch)):
            writer.write_table(pa.Table.from_pylist(part, schema=schema))
            count += len(part)
    return count
