"""Load for one server: `python load.py ADDRESS PID CLIENTS BATCH SECONDS PASS < questions`, then one JSON object.

Each client has a connection of its own and one request under way. HTTP is spoken on bare sockets and answers are not
decoded, so that the load costs little beside the server on the same machine. Only the processor time of process PID
and its children is counted.

No cache can answer: no question comes twice, since each pass over the questions adds a space to their ends, which
leaves their tokens as they are. Passes are numbered from PASS.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import psutil

WARM_UP_S = 1.0
TOPK = 3


@dataclass(frozen=True)
class Load:
    """Measurements between the first request and the last answer.

    Attributes:
        queries: answered.
        seconds: from the first request to the last answer.
        cpu_s: processor time of the server's processes.
        client_cpu_s: processor time of the load itself.
        p50_ms, p99_ms: of requests.
        next_pass: over the questions, for the next load.
    """

    queries: int
    seconds: float
    cpu_s: float
    client_cpu_s: float
    p50_ms: float
    p99_ms: float
    next_pass: int

    @property
    def per_s(self) -> float:
        return self.queries / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.queries / self.cpu_s


class Questions:
    """Endless texts without repetition."""

    def __init__(self, texts: list[str], first: int) -> None:
        self.passes = first
        self._texts = self._iterate_endless(texts)

    def take(self, count: int) -> list[str]:
        return list(itertools.islice(self._texts, count))

    def _iterate_endless(self, texts: list[str]) -> Iterator[str]:
        while True:
            self.passes += 1
            # Shuffled, so that a short load meets the same mix of lengths as a long one.
            for text in random.Random(self.passes).sample(texts, len(texts)):
                yield text + " " * self.passes


class Client:
    """One keep-alive connection."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**24)

    def close(self) -> None:
        self._writer.close()

    async def ask(self, queries: list[str]) -> None:
        body = json.dumps({"queries": queries, "topk": TOPK, "return_scores": True}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await self._reader.readexactly(length)
        if not answer.startswith(b"http/1.1 200 ") or body.count(b'"document"') != TOPK * len(queries):
            raise RuntimeError(f"the server answered {answer[:40]!r} {body[:200]!r}")


async def run(address: str, server: psutil.Process, clients: int, batch: int, seconds: float, texts: Questions) -> Load:
    """Warm up, then send requests for some seconds."""
    times: list[float] = []

    async def send_requests(until: float, into: list[float]) -> None:
        client = Client(address)
        await client.connect()
        while time.perf_counter() < until:
            queries = texts.take(batch)
            begin = time.perf_counter()
            await client.ask(queries)
            into.append(1000 * (time.perf_counter() - begin))
        client.close()

    warm = time.perf_counter() + min(WARM_UP_S, seconds / 4)
    await asyncio.gather(*(send_requests(warm, []) for _ in range(clients)))
    cpu, own, begin = _measure_cpu_s(server), time.process_time(), time.perf_counter()
    await asyncio.gather(*(send_requests(begin + seconds, times) for _ in range(clients)))
    took = time.perf_counter() - begin
    times.sort()
    return Load(
        queries=batch * len(times),
        seconds=took,
        cpu_s=_measure_cpu_s(server) - cpu,
        client_cpu_s=time.process_time() - own,
        p50_ms=times[len(times) // 2],
        p99_ms=times[min(len(times) - 1, int(0.99 * len(times)))],
        next_pass=texts.passes,
    )


def _measure_cpu_s(server: psutil.Process) -> float:
    spent = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(times.user + times.system for times in spent)


def main() -> None:
    address, pid, clients, batch, seconds, first = sys.argv[1:]
    texts = Questions(json.load(sys.stdin), int(first))
    load = asyncio.run(run(address, psutil.Process(int(pid)), int(clients), int(batch), float(seconds), texts))
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    main()
