"""Cost of tracing in the rollout loop at its highest: with an engine, a retriever and a reward that take no time.

Modes take turns, so that other load of the machine affects all of them. Metrics are processor time of this process, the
exporter's thread included; the collector is another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forage_proto.v1.reward_pb2 import ScoredItem, ScoreItem
from forage_proto.v1.trajectory_pb2 import ChatMessage, Document, Prompt, Provenance, Score, Status, TemplateValues
from forage_rollout.agent import Agent
from forage_rollout.loop.generation import Generation, RenderedPrompt, Request
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.retriever import SearchResult
from forage_runtime.settings import Settings, load_settings
from forage_runtime.telemetry import tracing
from forage_runtime.text.chat_template import Chat

MODEL = Path(__file__).parents[3] / "models/tiny-policy"
SEARCH, ANSWER = "<think>hm</think><search> who </search>", "<think>ah</think><answer> me </answer>"
SAMPLES = 8
WARM = 10
LOOPS = 100_000
MODES = {"off": None, "on": 1.0, "on for 1 %": 0.01}


class Engine:
    """Searches once, then answers."""

    def __init__(self, codec: FileTokenizer) -> None:
        self._prompt = codec.encode("Who?")
        self._lines = [codec.encode(SEARCH), codec.encode(ANSWER)]

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        return RenderedPrompt(self._prompt)

    async def generate(self, request: Request) -> Generation:
        ids = self._lines[len(request.token_ids) > len(self._prompt)]
        return Generation(ids, [-0.1] * len(ids), False, [(1, 1, 0, len(ids))])

    async def release(self, affinity: str) -> None:
        pass


class Services:
    """The retriever and the reward."""

    async def search(self, queries: Sequence[str]) -> SearchResult:
        document = Document(id="d", contents='"Title"\nA passage of a few words.', score=1.0)
        return SearchResult([[document] * 3 for _ in queries], Provenance(), False)

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoredItem]:
        score = Score(status=Status.STATUS_OK, total=1.0)
        return [ScoredItem(trajectory_id=item.trajectory_id, score=score) for item in items]


def build_settings(endpoint: str, ratio: float | None) -> Settings:
    traced = [] if ratio is None else ["tracing.enabled=true", f"tracing.sample_ratio={ratio}"]
    return load_settings(overrides=[f"tracing.endpoint={endpoint}", f"model.path={MODEL}", *traced], environ={})


def measure(settings: Settings, codec: FileTokenizer, groups: int) -> float:
    """Measure the processor time of one trajectory, in microseconds."""
    tracing.start(settings, "bench")
    services = Services()
    agent = Agent(settings, Engine(codec), services, services, codec, "<eos>", "bench")

    async def run() -> None:
        for group in range(groups):
            prompt = Prompt(
                run_id="bench",
                group_uid=f"g/{group}",
                data_source="world_facts",
                messages=[ChatMessage(role="user", content="Who?")],
                samples=SAMPLES,
            )
            done = await agent.run_group(prompt)
            assert all(trajectory.finished for trajectory in done.trajectories)
        await agent.close()

    began = time.process_time()
    asyncio.run(run())
    tracing.stop()
    return (time.process_time() - began) / (groups * SAMPLES) * 1e6


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--groups", type=int, default=200)
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    codec = FileTokenizer(MODEL)
    command = [sys.executable, str(Path(__file__).with_name("collector.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as collector:
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        cost: dict[str, list[float]] = {mode: [] for mode in MODES}
        for ratio in MODES.values():
            measure(build_settings(endpoint, ratio), codec, WARM)  # warm-up
        for _ in range(options.rounds):
            for mode, ratio in MODES.items():
                cost[mode].append(measure(build_settings(endpoint, ratio), codec, options.groups))
        received = int(collector.communicate()[0])
    traced = SAMPLES * (options.rounds * options.groups + WARM) * (1 + MODES["on for 1 %"])
    statement = "with span('x', {'a': 1}): pass"
    span_off_s = (
        min(timeit.repeat(statement, "from forage_runtime.telemetry.tracing import span", number=LOOPS)) / LOOPS
    )
    medians = {mode: statistics.median(values) for mode, values in cost.items()}
    metrics: dict[str, Any] = {
        "trajectory_us": {mode: round(value, 1) for mode, value in medians.items()},
        "ratio": {mode: round(value / medians["off"], 3) for mode, value in medians.items()},
        "span_off_ns": round(span_off_s * 1e9),
        "spans_a_trajectory": round(received / traced, 1),
    }
    print(f"{'tracing':<12} {'µs a trajectory':>16} {'of off':>8}   (lowest to highest of {options.rounds} rounds)")
    for mode, values in cost.items():
        of_off = medians[mode] / medians["off"]
        print(f"{mode:<12} {medians[mode]:>16.0f} {of_off:>8.2f}   ({min(values):.0f} to {max(values):.0f})")
    print(f"a trajectory opens {received / traced:.1f} spans; one takes {span_off_s * 1e9:.0f} ns while tracing is off")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
