"""Which waiting search is first: policies for the retriever's queue, simulated and over the wire.

`python queue_policies.py`, in the retriever's environment, prints one JSON line. A batch of trajectories begins at
once, searches up to three times and ends; the retriever searches 64 queries at a time and is the bottleneck. Lengths
are those of Search-R1's recipes: prompts of 300 tokens, generations of 150 (median) to 500, observations of 500.

- simulated: the service's own queue (`WaitingRequests`) on a clock of its own, by each policy;
- measured: the service's HTTP API and queue with the rollout's client, whose searches say how long the trajectory is
  or do not, in turns. Only the index (a wait for each batch) and the engine (a wait for each generation) are stand-ins.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn

from forage_retriever.hits import Filters, Hit, Provenance
from forage_retriever.serve.http_api import make_app
from forage_retriever.serve.retrieval import Retrieval
from forage_retriever.serve.source import LocalSource
from forage_retriever.serve.urgency import Urgency, compute_due
from forage_retriever.serve.waiting import MAX_BATCH, Request, SearchOptions, WaitingRequests
from forage_runtime.addresses import listen
from forage_runtime.clients.retriever import RetrieverClient, searching_for
from forage_runtime.telemetry.health import Health

SIMULATED, MEASURED = 512, 256
"""Trajectories; fewer where each costs the machine a connection."""
MAX_SEARCHES = 3
PROMPT, OBSERVATION, MEDIAN, LONGEST = 300, 500, 150, 500
SIMULATED_BATCH_S, SIMULATED_TOKENS_PER_S = 2.0, 30.0
MEASURED_BATCH_S, MEASURED_TOKENS_PER_S = 1.0, 150.0
ROUNDS = 2
ALL_ALIKE = SearchOptions("dense", 3)
POLICIES: dict[str, Callable[[Urgency, float], float]] = {
    "arrival": lambda urgency, now: now,
    "shortest first": lambda urgency, now: urgency.context_tokens,
    "longest first": lambda urgency, now: -urgency.context_tokens,
    "1 s per 256 tokens": lambda urgency, now: now - urgency.context_tokens / 256,
    "2 s per doubling": lambda urgency, now: now - 2 * math.log2(1 + urgency.context_tokens / 256),
    "the service's": compute_due,
}


@dataclass
class Trajectory:
    """The generations of one trajectory: all but the last one search."""

    number: int
    lengths: list[int]
    turn: int = 0
    asked: float = 0.0

    @property
    def context_tokens(self) -> int:
        """Tokens when it searches after generation `turn`."""
        return PROMPT + sum(self.lengths[: self.turn + 1]) + self.turn * OBSERVATION


@dataclass
class Waits:
    """(seconds, tokens of the trajectory) of each search, and when each trajectory ended."""

    each: list[tuple[float, int]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def summarize(self) -> dict[str, float]:
        seconds = [wait for wait, _ in self.each]
        held = sum(wait * tokens for wait, tokens in self.each) / sum(tokens for _, tokens in self.each)
        return {
            "wait_s": statistics.mean(seconds),
            "wait_per_token_s": held,
            "longest_wait_s": max(seconds),
            "trajectory_s": statistics.mean(self.ended),
            "batch_s": max(self.ended),
        }


def draw_trajectories(count: int) -> list[Trajectory]:
    chance = random.Random("queue")
    made = []
    for number in range(count):
        turns = chance.choices(range(2, MAX_SEARCHES + 2), [0.5, 0.3, 0.2])[0]
        drawn = (round(chance.lognormvariate(math.log(MEDIAN), 0.7)) for _ in range(turns))
        made.append(Trajectory(number, [min(LONGEST, max(20, tokens)) for tokens in drawn]))
    return made


def simulate(policy: Callable[[Urgency, float], float]) -> Waits:
    """Run the batch on a clock of its own; a search of a full batch takes `SIMULATED_BATCH_S`, of less a part of it."""
    requests: WaitingRequests[Request] = WaitingRequests(policy)
    waits, by_text = Waits(), {}
    arriving = [(one.lengths[0] / SIMULATED_TOKENS_PER_S, one.number, one) for one in draw_trajectories(SIMULATED)]
    heapq.heapify(arriving)
    now = 0.0
    while arriving or requests.queries:
        if not requests.queries:
            now = max(now, arriving[0][0])
        while arriving and arriving[0][0] <= now:
            one = heapq.heappop(arriving)[2]
            by_text[text := f"{one.number}/{one.turn}"] = one
            requests.add(Request([text], ALL_ALIKE, Urgency(one.context_tokens)), one.asked or now)
        _, batch = requests.take_batch(now)
        found = now + SIMULATED_BATCH_S * (0.25 + 0.75 * len(batch) / MAX_BATCH)
        for request, place in batch:
            one = by_text.pop(request.texts[place])
            waits.each.append((found - (one.asked or one.lengths[0] / SIMULATED_TOKENS_PER_S), one.context_tokens))
            one.turn += 1
            one.asked = found + one.lengths[one.turn] / SIMULATED_TOKENS_PER_S
            if one.turn == len(one.lengths) - 1:
                waits.ended.append(one.asked)
            else:
                heapq.heappush(arriving, (one.asked, one.number, one))
        now = found
    return waits


class SlowIndex:
    """Finds the one passage after a wait, as a large index would."""

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        time.sleep(MEASURED_BATCH_S * (0.25 + 0.75 * len(queries) / MAX_BATCH))
        return [[Hit(0, 1.0)] for _ in queries]


@contextmanager
def serve_slow_index() -> Iterator[str]:
    """The service's HTTP API over the slow index, on a thread of its own; gives its address."""
    listening, ready = listen("127.0.0.1:0"), threading.Event()
    passages = SimpleNamespace(rows=[b'{"id": "p", "contents": "T\\nt"}'], ids=["p"], contents=["T\nt"])
    provenance = Provenance("c", "e", "i", "dense")

    class Corpus(SimpleNamespace):
        def __len__(self) -> int:
            return 1

    index: Any = SimpleNamespace(
        searchers={"dense": SlowIndex()}, provenance=provenance, corpus=Corpus(**vars(passages))
    )

    async def serve() -> None:
        retrieval = Retrieval(3, 300.0, cache_bytes=0)
        retrieval.set_source(LocalSource(index, 65_536))
        config = uvicorn.Config(make_app(retrieval, Health()), log_config=None, access_log=False, lifespan="off")
        nonlocal server
        server = uvicorn.Server(config)
        ready.set()
        await server.serve([listening])

    server: uvicorn.Server | None = None
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait(60)
    host, port = listening.getsockname()[:2]
    try:
        yield f"{host}:{port}"
    finally:
        assert server is not None
        server.should_exit = True
        thread.join(60)


async def measure(address: str, says_length: bool, number: int) -> Waits:
    """Run the batch against the service."""
    waits, client, begun = Waits(), RetrieverClient(address, 120.0), time.perf_counter()

    async def run(one: Trajectory) -> None:
        for turn, tokens in enumerate(one.lengths):
            await asyncio.sleep(tokens / MEASURED_TOKENS_PER_S)
            if turn < len(one.lengths) - 1:
                asked, length = time.perf_counter(), one.context_tokens
                with searching_for(length) if says_length else nullcontext():
                    await client.search([f"{number}/{one.number}/{turn}"])
                waits.each.append((time.perf_counter() - asked, length))
                one.turn += 1
        waits.ended.append(time.perf_counter() - begun)

    await asyncio.gather(*(run(one) for one in draw_trajectories(MEASURED)))
    await client.close()
    return waits


def main() -> None:
    simulated = {name: simulate(policy).summarize() for name, policy in POLICIES.items()}
    rounds: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    with serve_slow_index() as address:
        for number in range(ROUNDS):
            for way, each in rounds.items():
                each.append(asyncio.run(measure(address, way == "with", number)).summarize())
    measured = {
        way: {name: statistics.median(one[name] for one in each) for name in each[0]} for way, each in rounds.items()
    }
    print(json.dumps({"simulated": simulated, "measured": measured}))


if __name__ == "__main__":
    main()
