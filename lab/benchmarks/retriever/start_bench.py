"""`make bench-retriever-start`: from the start of the process to `/readyz`, over 15,000 and a million passages.

The corpora and their Flat indexes of 384 dimensions are synthetic (see `made.py`) and kept in `.cache/bench`: 4 GB, six
while they are built, and some minutes on the first run. The retriever is started on each with its default settings, but
for the mode: once uncounted, which exports the encoder and leaves all files in the page cache, three times so, and once
after the files of the index were dropped from it (on Linux only). Bytes that a start read from disk show that they
were. Each start must answer a search. Ends with one line of JSON; of three starts the slowest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import made
from progress import Steps, report_build
from questions import CACHE
from rich.console import Console
from rich.table import Table
from service import Show, start_retriever

from forage_retriever.corpus import read
from forage_runtime.settings import RetrievalMode

SMALL, LARGE = 15_000, 1_000_000
MIN_PASSAGES = 1000
WARM_STARTS = 3
TOPK = 3
ENCODERS = CACHE / "retriever"
MADE = CACHE / "made"


@dataclass(frozen=True)
class Case:
    """An index to start on.

    Attributes:
        title: of its first passage.
    """

    mode: RetrievalMode
    passages: int
    folder: Path
    title: str


@dataclass(frozen=True)
class Start:
    """The cost of one start.

    Attributes:
        ready_s: from the start of the process until `/readyz` said so.
        answer_ms: of the first request.
        peak_rss: bytes, pages of mapped files included.
        own: anonymous bytes.
        read: bytes from disk until it was ready.
    """

    ready_s: float
    answer_ms: float
    peak_rss: int
    own: int
    read: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passages", nargs="?", type=int, default=LARGE, help="of the large corpus")
    large = parser.parse_args().passages
    if large < MIN_PASSAGES:
        parser.error(f"argument passages is {large}: give {MIN_PASSAGES} or more")
    CACHE.mkdir(parents=True, exist_ok=True)
    small, dense, hybrid = (
        build_case(RetrievalMode.HYBRID, SMALL),
        build_case(RetrievalMode.DENSE, large),
        build_case(RetrievalMode.HYBRID, large),
    )
    cases = (small, dense, hybrid)
    warm: dict[Case, list[Start]] = {}
    cold: dict[Case, Start] = {}
    with Steps(len(cases) * (WARM_STARTS + 2)) as steps:
        for case in cases:
            name = f"{case.mode}, {case.passages:,} passages"
            steps.begin(f"{name}: first start, not counted")
            start(case, steps.show)
            warm[case] = []
            for number in range(1, WARM_STARTS + 1):
                steps.begin(f"{name}: start {number} of {WARM_STARTS} from the page cache")
                warm[case].append(start(case, steps.show))
            steps.begin(f"{name}: start from disk")
            drop_from_page_cache(case.folder)
            cold[case] = start(case, steps.show)
    report(warm, cold)
    size = f"{large // 1_000_000}m" if large % 1_000_000 == 0 else f"{large // 1000}k"
    summary = {
        "start_15k_s": find_slowest(warm[small]),
        f"start_{size}_dense_s": find_slowest(warm[dense]),
        f"start_{size}_cold_s": cold[dense].ready_s,
        f"start_{size}_hybrid_s": find_slowest(warm[hybrid]),
        f"start_{size}_hybrid_cold_s": cold[hybrid].ready_s,
        f"rss_{size}_mib": max(one.peak_rss for one in (*warm[dense], cold[dense])) / 2**20,
        f"own_{size}_mib": max(one.own for one in (*warm[dense], cold[dense])) / 2**20,
        "cold_read_mib": cold[dense].read / 2**20,
        "warm_starts": WARM_STARTS,
    }
    print(json.dumps({key: round(value, 2) for key, value in summary.items()}))


def build_case(mode: RetrievalMode, passages: int) -> Case:
    """Build the index of so many synthetic passages if it is missing."""
    with report_build() as report:
        file = made.write_corpus(MADE, passages, report)
        folder = made.build_index(file, mode, MADE, ENCODERS, report)
    title, _ = read.split_contents(next(read.read_passages(file)).contents)
    return Case(mode, passages, folder, title)


def start(case: Case, show: Show) -> Start:
    """Start the retriever, search it once, end it."""
    log = MADE / f"{case.mode}-{case.passages}.log"
    settings = (f"retriever.mode={case.mode}", f"retriever.index={case.folder}", f"retriever.cache_dir={ENCODERS}")
    with start_retriever(log, *settings, show=show) as server:
        read_bytes = server.read_bytes()
        begin = time.monotonic()
        (documents,) = server.retrieve([case.title], TOPK)
        took = time.monotonic() - begin
        ids = [int(document["id"]) for document in documents]
        # Hybrid search puts the passage of that title first; synthetic vectors do not depend on it.
        if len(set(ids)) != TOPK or (case.mode is RetrievalMode.HYBRID and ids[0] != 0):
            sys.exit(f"the server was ready and found passages {ids} for {case.title!r}: see {log}")
        return Start(server.ready_s, 1000 * took, server.measure_peak_rss(), server.measure_own_memory(), read_bytes)


def drop_from_page_cache(folder: Path) -> None:
    """Drop the files of an index from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_slowest(starts: Sequence[Start]) -> float:
    return max(one.ready_s for one in starts)


def report(warm: dict[Case, list[Start]], cold: dict[Case, Start]) -> None:
    table = Table(title="the retriever's start, Flat, 384 dimensions")
    for column in ("passages", "mode", "files", "ready s", "first answer ms", "peak RSS MiB", "own MiB", "read MiB"):
        table.add_column(column, justify="left" if column in ("mode", "files") else "right")
    for case in warm:
        for files, starts in (("in the page cache", warm[case]), ("on disk", [cold[case]])):
            table.add_row(
                f"{case.passages:,}",
                case.mode,
                files,
                " ".join(f"{one.ready_s:.2f}" for one in starts),
                " ".join(f"{one.answer_ms:.0f}" for one in starts),
                *(
                    f"{max(getattr(one, metric) for one in starts) / 2**20:.0f}"
                    for metric in ("peak_rss", "own", "read")
                ),
            )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
