"""`make bench-retriever-large`: index types over a million vectors of 768 dimensions, and what they cost for wiki-18.

    .venvs/retriever/bin/python lab/benchmarks/retriever/large_bench.py [PASSAGES] [--types Flat IVF,SQ8 …] [--clean]

Vectors are made (`large_vectors.py` says how, and what is assumed), and written once to `.cache/bench/large`. Each type
is built and searched at an eighth, a quarter, a half and all of them, in processes of its own, by the retriever's own
code. From the sizes follow laws, which are checked on the largest and extrapolated to the 21,015,324 passages of
wiki-18 (`large_laws.py`). What is measured is kept: a run that was stopped goes on, and a second prints the
tables again. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import large_report
import large_table
import numpy as np
from large_build import KINDS, Kind
from large_measure import Task
from large_vectors import DIMENSION, Maker, Vectors, make_vectors
from progress import Steps
from questions import CACHE

from forage_retriever.index.space import measure_available_memory
from forage_retriever.search import memory
from forage_runtime.files import durable

HERE = Path(__file__).resolve().parent
PASSAGES, MIN_PASSAGES = 1_000_000, 40_000
SHARES = (8, 4, 2, 1)
"""The sizes that are measured are passages divided by these."""

DEFAULT = ("Flat", "SQ8", "IVF,SQ8", "IVF,PQ192x4fs", "HNSW32_SQ8")
QUESTIONS, NEAREST = 1024, 10
SECONDS = {True: 2.0, False: 1.0}
"""Of one measurement, at the largest size and at the others."""

_BLOCK = 65_536
_SPARE = 2**30
_FORMAT = 2
"""Of the results; others are measured again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passages", nargs="?", type=int, default=PASSAGES, help=f"number of vectors ({PASSAGES})")
    parser.add_argument("--types", nargs="+", default=DEFAULT, metavar="TYPE", choices=[kind.name for kind in KINDS])
    parser.add_argument("--again", action="store_true", help="measure again what was measured before")
    parser.add_argument("--clean", action="store_true", help="delete the vectors and results of this size, and end")
    parser.add_argument("--write", action="store_true", help="write the laws where `forage plan` reads them")
    arguments = parser.parse_args()
    if arguments.passages < MIN_PASSAGES:
        parser.error(f"argument passages is {arguments.passages}: give {MIN_PASSAGES} or more, for the laws")
    bench = Bench(arguments.passages, [kind for kind in KINDS if kind.name in arguments.types])
    if arguments.clean:
        shutil.rmtree(bench.folder, ignore_errors=True)
        return
    if problem := bench.find_shortage():
        sys.exit(problem)
    if arguments.again:
        bench.forget()
    bench.run()
    measured = {kind: {int(size): row for size, row in bench.results[kind.name].items()} for kind in bench.kinds}
    if arguments.write:
        large_table.write(bench.results, measured, arguments.passages)
    large_report.report(measured, bench.results["encoder"], arguments.passages)


class Bench:
    """Runs what is missing, and keeps what is measured.

    Attributes:
        folder: of the vectors and results.
        kinds: the types.
        results: by type, and size.
    """

    def __init__(self, passages: int, kinds: list[Kind]) -> None:
        self.folder = CACHE / "large" / str(passages)
        self.kinds = kinds
        self.results: dict[str, Any] = self._read_results()
        self._passages = passages
        self._sizes = [passages // share for share in SHARES]
        self._began = time.monotonic()
        self._estimated = self._spent = 0.0

    def find_shortage(self) -> str:
        """What there is too little of, in a sentence; empty if there is enough."""
        needs = {
            kind.name: memory.estimate_needs(kind.write_factory(self._passages), DIMENSION, self._passages)
            for kind in self.kinds
            if str(self._passages) not in self.results.get(kind.name, {})
        }
        if not needs:
            return ""
        vectors = 4 * DIMENSION * self._passages
        made = (self.folder / "vectors.npy").exists()
        disk = max(need.disk_bytes for need in needs.values()) * 3 // 2 + (0 if made else vectors) + _SPARE
        CACHE.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(CACHE).free
        if free < disk:
            return (
                f"{self._passages:,} vectors need {disk / memory.GIB:.0f} GiB on the disk of {CACHE}, of which"
                f" {free / memory.GIB:.0f} GiB are free: free some, or give fewer passages"
            )
        available = measure_available_memory()
        # An index is built whole here, in memory, as a graph must be; `forage index build` writes the others in parts.
        held = {name: max(need.build_bytes, need.ram_bytes) + _SPARE for name, need in needs.items()}
        for name, size in held.items():
            if size > available:
                rest = " ".join(other for other, less in held.items() if less <= available)
                return (
                    f"building {name} over {self._passages:,} vectors needs {size / memory.GIB:.0f} GiB of memory, of"
                    f" which {available / memory.GIB:.0f} GiB are free: give fewer passages"
                    + (f", or --types {rest}" if rest else "")
                )
        return ""

    def forget(self) -> None:
        """Forget the results of the types that are measured now."""
        for kind in self.kinds:
            self.results.pop(kind.name, None)

    def run(self) -> None:
        """Make vectors and questions, build and measure every type at every size, and encode questions."""
        todo = [
            (kind, size)
            for kind in self.kinds
            for size in self._sizes
            if str(size) not in self.results.get(kind.name, {})
        ]
        self._estimated = 60e-6 * self._passages + sum(self._estimate(kind, size) for kind, size in todo) + 60
        print(f"about {self._estimated / 60:.0f} minutes on {os.cpu_count()} idle cores", file=sys.stderr)
        with Steps(len(todo) + 3) as steps:
            steps.begin(f"making {self._passages:,} vectors")
            vectors = make_vectors(self.folder / "vectors.npy", self._passages, lambda done: steps.show(f"{done:,}"))
            steps.begin(f"finding the exact nearest of {QUESTIONS} questions")
            self._ask(vectors, steps)
            self._spent = 60e-6 * self._passages
            for kind, size in todo:
                steps.begin(f"{kind.name}, {size:,} vectors ({self._describe_rest()})")
                self._measure(kind, size, steps)
                self._spent += self._estimate(kind, size)
            steps.begin("encoding questions with a model of e5-base-v2's shape")
            if "encoder" not in self.results:
                task = {"folder": str(CACHE / "encoder"), "seconds": 4.0}
                self._keep("encoder", self._call("large_encoder.py", task, steps))

    def _describe_rest(self) -> str:
        """Time left, by the pace so far."""
        pace = (time.monotonic() - self._began) / self._spent if self._spent else 1.0
        return f"{pace * (self._estimated - self._spent) / 60:.0f} min left"

    def _estimate(self, kind: Kind, size: int) -> float:
        """Seconds that two idle cores take; more do not count, so that they are a pleasant surprise."""
        cells = 4.096 * size**0.5
        work = 5e-6 * size
        if kind.is_graph:
            work += 4e-4 * (size if size == self._sizes[0] else size / 2)
        elif kind.has_cells:
            work += 1.2e-8 * cells * size + 8e-8 * cells * max(100_000, 40 * cells)
        measured = 7 if size == self._passages else 2.5
        return work + len(kind.efforts) * measured * SECONDS[size == self._passages]

    def _ask(self, vectors: Vectors, steps: Steps) -> None:
        """Questions about passages that all sizes have, and their nearest at each size."""
        files = [self._name(size, "exact") for size in self._sizes]
        if all(file.exists() for file in files):
            return
        asked = np.random.default_rng(1).permutation(self._sizes[0] - 1)[:QUESTIONS]
        questions = Maker().draw_questions(np.asarray(vectors[asked]), np.asarray(vectors[asked + 1]))
        np.save(self.folder / "questions.npy", questions)
        scores = np.empty((QUESTIONS, 0), np.float32)
        rows = np.empty((QUESTIONS, 0), np.int64)
        cuts = sorted({*range(0, self._passages, _BLOCK), *self._sizes})
        for begin, end in zip(cuts, [*cuts[1:], None], strict=True):
            if begin in self._sizes:
                np.save(self._name(begin, "exact"), rows)
            if end is None:
                break
            products = questions @ vectors[begin:end].T
            best = np.argpartition(-products, min(NEAREST, end - begin - 1), axis=1)[:, :NEAREST]
            scores = np.concatenate([scores, np.take_along_axis(products, best, 1)], axis=1)
            rows = np.concatenate([rows, best + begin], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :NEAREST]
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
            steps.show(f"{end:,}")

    def _name(self, size: int, what: str) -> Path:
        return self.folder / f"{what}-{size}.npy"

    def _measure(self, kind: Kind, size: int, steps: Steps) -> None:
        """Build and measure one index. A graph is kept until the next size has grown from it."""
        folder, smaller = self._find_folder(kind, size), self._find_smaller(size)
        shutil.rmtree(folder, ignore_errors=True)
        grow = self._find_folder(kind, smaller)
        can_grow = kind.is_graph and grow.exists() and str(smaller) in self.results.get(kind.name, {})
        if kind.has_cells and str(size) not in self.results.get("cells", {}):
            (self.folder / f"cells-{size}.npy").unlink(missing_ok=True)
        task = {
            "kind": kind.name,
            "folder": str(folder),
            "passages": size,
            "vectors": str(self.folder / "vectors.npy"),
            "grow": str(grow) if can_grow else None,
        }
        built = self._call("large_build.py", task, steps)["built"]
        if grow != folder:
            shutil.rmtree(grow, ignore_errors=True)
        is_full = size == self._passages
        measured = self._call(
            "large_measure.py",
            asdict(
                Task(
                    str(folder),
                    str(self.folder / "questions.npy"),
                    str(self._name(size, "exact")),
                    list(kind.efforts),
                    os.cpu_count() or 1,
                    SECONDS[is_full],
                    is_full,
                )
            ),
            steps,
        )
        earlier = self.results[kind.name][str(smaller)] if can_grow else {}
        cells = self._keep_cells(size, built["stages"].pop("cells", None))
        seconds = {
            unit: sum(stage[unit] for stage in built["stages"].values())
            + (cells[unit] if kind.has_cells else 0.0)
            + earlier.get(f"build_{unit}", 0.0)
            for unit in ("s", "cpu_s")
        }
        result = measured | {
            "factory": built["factory"],
            "build_s": seconds["s"],
            "build_cpu_s": seconds["cpu_s"],
            "build_peak_gib": built["peak"] / memory.GIB,
            "bytes": built["sizes"],
        }
        self._keep(kind.name, self.results.get(kind.name, {}) | {str(size): result})
        if is_full or not kind.is_graph:
            shutil.rmtree(folder)

    def _find_folder(self, kind: Kind, size: int) -> Path:
        return self.folder / f"{kind.name.replace(',', '-')}-{size}"

    def _find_smaller(self, size: int) -> int:
        """The size before; the first is its own."""
        return self._sizes[max(self._sizes.index(size) - 1, 0)]

    def _keep_cells(self, size: int, trained: dict[str, float] | None) -> dict[str, float]:
        """Seconds of training the cells of this size: trained once, and counted for every type that has them."""
        cells = dict(self.results.get("cells", {}))
        if trained is not None and str(size) not in cells:
            self._keep("cells", cells | {str(size): trained})
        return dict(self.results.get("cells", {}).get(str(size), {"s": 0.0, "cpu_s": 0.0}))

    def _call(self, script: str, task: dict[str, Any], steps: Steps) -> dict[str, Any]:
        """Run a script of this folder. Returns its last line of JSON; the others are its progress."""
        command = [sys.executable, str(HERE / script)]
        last: dict[str, Any] = {}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            for line in process.stdout:
                if line.startswith("{"):
                    last = json.loads(line)
                    if "done" in last:
                        steps.show(f"{last['done']:,} of {last['of']:,} added")
        if process.returncode:
            sys.exit(f"{script} failed with {json.dumps(task)}: see above")
        return last

    def _read_results(self) -> dict[str, Any]:
        try:
            kept: dict[str, Any] = json.loads((self.folder / "results.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {"format": _FORMAT}
        return kept if kept.get("format") == _FORMAT else {"format": _FORMAT}

    def _keep(self, name: str, result: dict[str, Any]) -> None:
        self.results[name] = result
        durable.write_atomically(self.folder / "results.json", json.dumps(self.results, indent=1))


if __name__ == "__main__":
    main()
