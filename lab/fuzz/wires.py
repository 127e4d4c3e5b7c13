"""The wires that can be fuzzed: for each its target and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzz import services, streams
from fuzz.files import FileSurface
from fuzz.inputs import Input
from fuzz.requests import HttpSurface, generate_requests
from fuzz.targets import Target


@dataclass(frozen=True)
class Wire:
    """A wire.

    Attributes:
        make: starts nothing yet; its files go into the folder.
        generate: the inputs of a seed.
        concurrency: inputs that are under way at once.
    """

    make: Callable[[Path], Target]
    generate: Callable[[int], Iterator[Input]]
    concurrency: int = 24


def _over_http(make: Callable[[Path], Target], describe: Callable[[], HttpSurface]) -> Wire:
    return Wire(make, lambda seed: generate_requests(describe(), seed))


def _in_files(wire: str, environment: str, module: str) -> Wire:
    surface = FileSurface(wire, environment, module)
    return Wire(surface.make, surface.generate, concurrency=2)


WIRES: dict[str, Wire] = {
    "reward": Wire(services.make_reward, lambda seed: services.describe_reward().generate(seed)),
    "retriever-grpc": Wire(services.make_retriever, lambda seed: services.describe_retriever_calls().generate(seed)),
    "retriever-http": _over_http(services.make_retriever, services.describe_retriever_http),
    "rollout-grpc": Wire(services.make_rollout, lambda seed: services.describe_rollout_calls().generate(seed)),
    "rollout-http": _over_http(services.make_rollout, services.describe_rollout_http),
    "stream-prompts": Wire(streams.make_dispatcher, streams.generate_prompts, concurrency=16),
    "stream-groups": Wire(streams.make_batches, streams.generate_groups, concurrency=32),
    "console": _over_http(services.make_console, services.describe_console),
    "run-files": _in_files("run-files", "console", "run_files"),
    "training-files": _in_files("training-files", "trainer", "training_files"),
    "search-files": _in_files("search-files", "retriever", "search_files"),
}
"""Name → wire, as `make fuzz WIRES=…` takes them."""
