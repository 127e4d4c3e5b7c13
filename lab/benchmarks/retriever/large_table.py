"""Writes measured speeds where `forage plan` reads them: cli/forage_cli/planning/retrieval_speeds.yaml."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import large_laws
from large_build import Kind
from large_vectors import DIMENSION
from questions import REPOSITORY

from forage_retriever.search import memory

FILE = REPOSITORY / "cli/forage_cli/planning/retrieval_speeds.yaml"
WIKI18 = 21_015_324
_CPU = Path("/proc/cpuinfo")
_HEAD = """\
# What a search and the encoding of a question cost, in seconds of one CPU core; read by `forage plan` and
# `forage config check`. Written by `{command} WRITE=1`, on made vectors
# (lab/benchmarks/retriever/large_vectors.py).
#
# A search of one query takes, with n passages, c cells, p = min(nprobe, c) and e = efSearch:
#     base + passage·n + cell·c + code·n·p/c + step·e·log2(n)
# where "single" are queries one by one, and "batch" those in batches of 64. Coefficients that a type lacks are 0. For
# another dimension d all but base are multiplied by d/{dimension} (assumed). Cells that are found by a graph
# (IVF65536_HNSW32) are not in the table.
measured: {{dimension: {dimension}, passages: {passages}, date: {date}, cpu: "{cpu}", command: {command}}}
encoders:  # a question on one core; BERT-base's shape (e5-base-v2), random weights: values do not change the work
  base: {encoders}
# recall_3 by effort (efSearch or nprobe): share of the exact top 3 that is found, measured over so many passages;
# recall_3_wiki18: the same, extrapolated to {wiki18:,}. refined: candidates are scored from stored float16 vectors (on
# disk, 2 bytes a dimension). bytes: of memory a passage of wiki-18.
types:
"""


def write(results: Mapping[str, Any], measured: Mapping[Kind, Mapping[int, Any]], passages: int) -> None:
    """Replace the file by the laws of these results."""
    encoders = {
        precision: {name: results["encoder"][precision][f"{name}_s"] for name in ("single", "batch")}
        for precision in ("fp32", "int8")
    }
    text = _HEAD.format(
        command=f"make bench-retriever-large PASSAGES={passages}",
        dimension=DIMENSION,
        passages=passages,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        cpu=_read_cpu(),
        wiki18=WIKI18,
        encoders=_format({precision: _format(row) for precision, row in encoders.items()}),
    )
    # SQ8 without cells reads everything as Flat does, and takes longer in batches: nobody should choose it for speed.
    kinds = [kind for kind in measured if kind.name == "Flat" or kind.is_graph or kind.has_cells]
    FILE.write_text(text + "".join(_describe(kind, dict(measured[kind]), passages) for kind in kinds), "utf-8")


def _describe(kind: Kind, sizes: dict[int, Any], passages: int) -> str:
    needs = memory.estimate_needs(kind.write_factory(WIKI18), DIMENSION, WIKI18)
    lines = [f"  {kind.name}:"]
    if needs.vectors_bytes:
        lines.append("    refined: true")
    lines.append(f"    bytes: {round(needs.ram_bytes / WIKI18)}")
    recalls = {row["effort"]: round(row["recall_3"], 3) for row in sizes[passages]["rows"]}
    lines.append(f"    recall_3: {_format(recalls)}")
    if kind.is_graph or kind.has_cells:
        grown = {effort: round(large_laws.fit_recall(sizes, effort)[0](WIKI18), 3) for effort in kind.efforts}
        lines.append(f"    recall_3_wiki18: {_format(grown)}")
    for name in ("single", "batch"):
        law = large_laws.fit_search(kind, sizes, f"{name}_s").coefficients
        lines.append(f"    {name}: {_format({key: value for key, value in law.items() if value})}")
    return "\n".join(lines) + "\n"


def _format(values: Mapping[Any, Any]) -> str:
    """A mapping in one line of YAML, numbers with three digits."""
    parts = (f"{key}: {value if isinstance(value, str) else _format_number(value)}" for key, value in values.items())
    return "{" + ", ".join(parts) + "}"


def _format_number(value: float) -> str:
    """As YAML reads it as a number: with a point before the exponent."""
    text = f"{value:.3g}"
    return text.replace("e-", ".0e-") if "e-" in text and "." not in text else text


def _read_cpu() -> str:
    """The model's name, and whether it has AVX-512."""
    try:
        lines = dict(
            line.split(":", 1) for line in _CPU.read_text(encoding="utf-8").split("\n\n")[0].splitlines() if ":" in line
        )
        fields = {name.strip(): value.strip() for name, value in lines.items()}
    except OSError:  # not Linux
        return "unknown"
    return fields.get("model name", "unknown") + (", AVX-512" if "avx512f" in fields.get("flags", "") else "")
