"""Measures seconds and memory of every stage of a build: `build_stages.py PASSAGES TYPE [MODE]`.

The passages are made, and so are their vectors of 768 numbers: what is measured is all but the encoder. The last line
is JSON: by stage `seconds` and `peak_gib`, the greatest resident memory of the process without mapped files.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forage_retriever.encoders import conventions
from forage_retriever.index.build import build_index
from forage_retriever.index.recipe import Recipe
from forage_runtime.settings import RetrievalMode, RetrieverSettings

DIMENSION = 768
WORDS = 100
"""In a passage, as in Wikipedia's of 2018."""

CENTRES = 2000


class MadeEncoder:
    """Vectors around some centres, by the order of the passages."""

    digest = family = model = "made"
    convention = conventions.PLAIN
    precision, device, dimension = "fp32", "cpu", DIMENSION

    def __init__(self) -> None:
        self._chance = np.random.default_rng(0)
        self._centres = self._chance.standard_normal((CENTRES, DIMENSION)).astype(np.float32)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self.encode_passages(texts, lambda done: None)

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> NDArray[np.float32]:
        vectors = self._chance.standard_normal((len(texts), DIMENSION), np.float32)
        vectors += self._centres[self._chance.integers(0, CENTRES, len(texts))]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class Watch:
    """Receives reports; notes the seconds of each stage and the greatest memory in it."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self._stage, self._begun = "", time.monotonic()
        threading.Thread(target=self._sample, daemon=True).start()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage == self._stage or (not done and total is None and stage.startswith(("encode", "resumed"))):
            return
        self.end()
        self._stage, self._begun = stage, time.monotonic()
        self.stages[stage] = {"seconds": 0.0, "peak_gib": 0.0}

    def end(self) -> None:
        """End the stage."""
        if self._stage:
            self.stages[self._stage]["seconds"] = round(time.monotonic() - self._begun, 1)

    def _sample(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            own = int(status.partition("RssAnon:")[2].split()[0]) / 2**20
            if self._stage:
                stage = self.stages[self._stage]
                stage["peak_gib"] = round(max(stage["peak_gib"], own), 2)
            time.sleep(0.05)


def write_passages(file: Path, count: int) -> None:
    """Write a corpus of made passages whose words are as unevenly frequent as those of a language."""
    chance = random.Random(0)
    words = [f"{''.join(chance.choices('aeioulnrst', k=chance.randint(2, 9)))}" for _ in range(50_000)]
    weights = [1 / place for place in range(1, len(words) + 1)]
    drawn = chance.choices(words, weights, k=1_000_000)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            begin = chance.randrange(len(drawn) - WORDS)
            text = " ".join(drawn[begin : begin + WORDS])
            lines.write(json.dumps({"id": str(number), "contents": f'"{drawn[begin]} {number}"\n{text}'}) + "\n")


def main() -> None:
    """Entry point."""
    count, factory = int(sys.argv[1]), sys.argv[2]
    mode = RetrievalMode(sys.argv[3] if len(sys.argv) > 3 else "hybrid")
    folder = Path(tempfile.mkdtemp(prefix="forage-build-", dir="."))
    try:
        write_passages(folder / "corpus.jsonl", count)
        settings = RetrieverSettings(mode=mode, faiss_factory=factory)
        recipe = replace(Recipe.from_settings(settings, MadeEncoder()), threads=2)
        watch = Watch()
        build_index(folder / "index", folder / "work", folder / "corpus.jsonl", recipe, watch)
        watch.end()
    finally:
        shutil.rmtree(folder)
    for stage, seen in watch.stages.items():
        print(f"{stage:32} {seen['seconds']:8.1f} s {seen['peak_gib']:6.2f} GiB")
    print(json.dumps({"passages": count, "type": factory, "stages": watch.stages}))


if __name__ == "__main__":
    main()
