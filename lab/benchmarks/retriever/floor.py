"""The floor under any server: `python floor.py BATCH SECONDS PASS key=value … < questions`, then one JSON object.

Encoder and FAISS alone: batches of the size that the service was seen to search, with its own index and settings, one
after the other in one thread; no server, no queue, no JSON.
"""

from __future__ import annotations

import json
import sys
import time

from load import TOPK, Questions

from forage_retriever.index import load as index
from forage_runtime.settings import settings_from_arguments

WARM_UP = 3


def main() -> None:
    batch, seconds, first = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    settings = settings_from_arguments(sys.argv[4:])
    texts = Questions(json.load(sys.stdin), first)
    searcher = index.load_index(settings.data.corpus, settings.retriever, lambda _: None).searcher
    for _ in range(WARM_UP):
        searcher.search(texts.take(batch), TOPK)
    queries, cpu, begin = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        queries += len(searcher.search(texts.take(batch), TOPK))
    took, spent = time.perf_counter() - begin, time.process_time() - cpu
    print(json.dumps({"queries": queries, "seconds": took, "cpu_s": spent, "next_pass": texts.passes}))


if __name__ == "__main__":
    main()
