"""The tables of `large_bench.py`, and its line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import large_laws
from large_build import Kind
from large_table import WIKI18
from large_vectors import DIMENSION
from questions import REPOSITORY
from rich import box
from rich.console import Console
from rich.table import Table

from forage_retriever.search import memory

VALUES = "deploy/helm/forage/values-gpu-large.yaml"
"""Of configs/search_r1_nq_hotpotqa_grpo_7b.yaml."""
_WIDTH = 80
Row = dict[str, Any]


def report(measured: dict[Kind, dict[int, Row]], encoding: Row, passages: int) -> None:
    """Print what was measured, the laws, what follows for wiki-18 and the recipe, and JSON. Tables are Markdown.

    Args:
        measured: results of each type by size.
        encoding: CPU seconds of a question by precision.
    """
    console = Console(width=_WIDTH)
    console.print(_show_measured(measured, passages))
    console.print(_show_costs(measured, passages))
    console.print(_show_laws(measured))
    rows = [predict(kind, sizes, effort, WIKI18) for kind, sizes in measured.items() for effort in kind.efforts]
    console.print(_show_wiki18(rows))
    need = read_needs()
    gives = [(row, {p: count_given(need, row, encoding[p]["batch_s"]) for p in ("fp32", "int8")}) for row in rows]
    console.print(_show_needs(need, gives, encoding))
    types = {}
    for kind, sizes in measured.items():
        row = next(row for row in sizes[passages]["rows"] if row["effort"] == kind.default)
        whole = sizes[passages]
        types[kind.name] = {
            "effort": row["effort"],
            "qps_per_core": 1 / row["batch_s"],
            "qps_per_core_single": 1 / row["single_s"],
            "recall_at_3": row["recall_3"],
            "recall_at_10": row["recall_10"],
            "p99_ms": row["p99_ms"],
            "rss_gib": whole["held_gib"] + whole["mapped_gib"],
            "build_s": whole["build_s"],
            "start_s": whole["start_s"],
        }
    used = find_used(need, gives)
    given = used[1][choose_precision(need)] if used else None
    summary = {
        "passages": passages,
        "types": {name: {key: round(value, 4) for key, value in row.items()} for name, row in types.items()},
        "needed_7b": round(need["needed"], 1),
        "type_7b": f"{used[0]['factory']} {used[0]['effort']}" if used else None,
        "given_7b": round(given, 1) if given else None,
        "given_over_needed_7b": round(given / need["needed"], 2) if given else None,
    }
    print(json.dumps(summary))


def predict(kind: Kind, sizes: dict[int, Row], effort: int, passages: int) -> Row:
    """What the laws say of a type over so many vectors."""
    features = large_laws.list_search_features(kind, passages, effort)
    build = large_laws.fit_build(kind, sizes).predict(large_laws.list_build_features(kind, passages))
    factory = kind.write_factory(passages)
    recall, error = large_laws.fit_recall(sizes, effort)
    return {
        "kind": kind,
        "factory": factory,
        "effort": effort,
        "single_s": large_laws.fit_search(kind, sizes, "single_s").predict(features),
        "batch_s": large_laws.fit_search(kind, sizes, "batch_s").predict(features),
        "recall_3": recall(passages) if _ranks_coarsely(kind) else sizes[max(sizes)]["rows"][0]["recall_3"],
        "recall_error": error,
        "ram_gib": memory.estimate_needs(factory, DIMENSION, passages).ram_bytes / memory.GIB,
        "build_cpu_h": build / 3600,
    }


def _ranks_coarsely(kind: Kind) -> bool:
    """Whether recall depends on the number of vectors: not where all of them are read."""
    return kind.is_graph or kind.has_cells


def read_needs() -> Row:
    """What the 7B recipe needs, by the figures of `forage plan`."""
    command = [REPOSITORY / ".venvs/cli/bin/python", REPOSITORY / "lab/benchmarks/retriever/large_needed.py"]
    text = subprocess.check_output([*command, REPOSITORY / VALUES], text=True, cwd=REPOSITORY, encoding="utf-8")
    needs: Row = json.loads(text)
    return needs


def count_given(need: Row, row: Row, encoding_s: float) -> float:
    """Queries a second of all replicas: encoding, search and the service, on as many CPUs as threads keep busy."""
    cpus = 1 + (need["cpus"] - 1) * need["thread_use"]
    return float(need["replicas"] * cpus / (encoding_s + row["batch_s"] + need["service_s"]))


def choose_precision(need: Row) -> str:
    """The recipe's precision of the encoder on CPUs."""
    return "fp32" if need["precision"] == "fp32" else "int8"


def find_used(need: Row, gives: Sequence[tuple[Row, dict[str, float]]]) -> tuple[Row, dict[str, float]] | None:
    """The type of the recipe, at its effort; None: it was not measured."""
    for row, given in gives:
        kind = row["kind"]
        if kind.name == need["type"] and (not _ranks_coarsely(kind) or row["effort"] == need["efforts"][kind.is_graph]):
            return row, given
    return None


def _show_measured(measured: dict[Kind, dict[int, Row]], passages: int) -> Table:
    table = _open_table(
        f"{passages:,} vectors of {DIMENSION} dimensions, one thread: queries per CPU second alone and in batches"
        " of 64; p99 of queries that come one by one at 0.7 of what is possible; share of the exact nearest"
        " that is found",
        ("type", "effort", "q/s 1", "q/s 64", "p99 ms", "top 3", "top 10"),
    )
    for kind, sizes in measured.items():
        for row in sizes[passages]["rows"]:
            speeds = (_rate(1 / row["single_s"]), _rate(1 / row["batch_s"]), f"{row['p99_ms']:.1f}")
            table.add_row(
                kind.write_factory(passages),
                _effort(kind, row["effort"]),
                *speeds,
                f"{row['recall_3']:.3f}",
                f"{row['recall_10']:.3f}",
            )
    return table


def _show_costs(measured: dict[Kind, dict[int, Row]], passages: int) -> Table:
    table = _open_table(
        "the same: memory of the process that searched, GiB; seconds from opening to the first answer (files in the"
        " page cache); seconds of building; queries/s with all threads, batches of 64",
        ("type", "held", "mapped", "start s", "build s", "CPU s", "q/s all"),
    )
    for kind, sizes in measured.items():
        whole = sizes[passages]
        default = next(row for row in whole["rows"] if row["effort"] == kind.default)
        values = (whole["held_gib"], whole["mapped_gib"], whole["start_s"])
        table.add_row(
            kind.write_factory(passages),
            *(f"{value:.2f}" for value in values),
            f"{whole['build_s']:.0f}",
            f"{whole['build_cpu_s']:.0f}",
            _rate(default["all_threads_qps"]),
        )
    return table


def _show_laws(measured: dict[Kind, dict[int, Row]]) -> Table:
    table = _open_table(
        "laws, in seconds of a query: coefficients of all sizes; error at the largest size of a law fitted without it",
        ("type", "law of batches", "1", "64", "build", "top 3"),
    )
    for kind, sizes in measured.items():
        single, batch = (large_laws.fit_search(kind, sizes, column) for column in ("single_s", "batch_s"))
        build = large_laws.fit_build(kind, sizes)
        recall = large_laws.fit_recall(sizes, kind.default)[1]
        law = " + ".join(f"{value:.1e}·{name}" for name, value in batch.coefficients.items() if value)
        table.add_row(
            kind.name,
            law.replace("·base", ""),
            *(f"{one.error:+.0%}" for one in (single, batch, build)),
            f"{recall:+.3f}" if _ranks_coarsely(kind) else "",
        )
    return table


def _show_wiki18(rows: Sequence[Row]) -> Table:
    table = _open_table(
        f"extrapolated to wiki-18, {WIKI18:,} × {DIMENSION}, by the laws; RAM by FAISS's file formats",
        ("type", "effort", "q/s 1", "q/s 64", "top 3", "GiB", "CPU h"),
    )
    for row in rows:
        table.add_row(
            row["factory"],
            _effort(row["kind"], row["effort"]),
            *(_rate(1 / row[column]) for column in ("single_s", "batch_s")),
            f"{row['recall_3']:.2f}",
            f"{row['ram_gib']:.1f}",
            f"{row['build_cpu_h']:.1f}",
        )
    return table


def _show_needs(need: Row, gives: Sequence[tuple[Row, dict[str, float]]], encoding: Row) -> Table:
    machine = f"{need['replicas']} × {need['cpus']} CPUs"
    slow, fast = (f"{1000 * encoding[precision]['batch_s']:.0f}" for precision in ("fp32", "int8"))
    table = _open_table(
        f"the 7B recipe on {VALUES.rpartition('/')[2]} ({machine}, {need['gpu']}): {need['mean']:.0f} queries/s needed"
        f" while engines sample, {need['peak']:.0f} to answer {need['searching']:,} trajectories at once within"
        f" {need['limit_s']:.0f} s. Given, with the encoder's {slow} (fp32) or {fast} (int8) CPU ms a question",
        ("type", "effort", "fp32 q/s", "÷ needed", "int8 q/s", "÷ needed"),
    )
    for row, given in gives:
        cells = [text for rate in given.values() for text in (_rate(rate), f"{rate / need['needed']:.1f}")]
        table.add_row(row["factory"], _effort(row["kind"], row["effort"]), *cells)
    return table


def _open_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}\n", title_justify="left", title_style="", box=box.MARKDOWN)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _effort(kind: Kind, effort: int) -> str:
    return str(effort) if _ranks_coarsely(kind) else ""


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
