"""Prometheus metrics of the whole service, from the counts that its processes report.

A count is a number under a name, which may carry labels as Prometheus writes them: `calls{service="reward"}`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forage_common.clients.calls import GIVEN_UP, RETRIED
from forage_common.clients.circuit import OPEN, OPENED
from forage_common.telemetry.trace_context import DROPPED
from forage_common.v1.trajectory_pb2 import Policy, TrajectoryGroup

Counts = Mapping[str, float]
_PREFIX = "forage_rollout_"
_GAUGES = {
    "circuit_open": "Circuits that are open: the service is left alone for a moment",
    "groups_in_flight": "Prompts being worked on",
    "out_of_service": "Engines that do not serve: the announced policy could not be loaded",
    "paused": "Engines that stand still",
    "prompts_on_stream": "Prompts on the stream: those that wait, and those being worked on",
    "replicas": "Processes of a deployment that answer",
    "requests_in_flight": "Generations waiting or running in the engine",
    "requests_running": "Generations that the engine samples from",
    "requests_waiting": "Generations that wait within the engine",
    "samples_in_flight": "Trajectories being worked on",
    "trajectories_on_stream": "Groups on the stream until the trainer has a checkpoint of their step",
}
_HELP = {
    "adapter_loads": "LoRA adapters loaded",
    "backpressure_seconds": "Time without new prompts because the trainer has not read what was written",
    "busy_seconds": "Time of engines with at least one request",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache: its hits; prompt_tokens are its queries",
    "call_retries": "Attempts to call a service that failed and were repeated",
    "calls_given_up": "Calls of a service that failed for good",
    "circuits_opened": "Times that a service was left alone after failures in a row",
    "environment_failures": "Trajectories that failed because the code of their environment raised",
    "failed_internal": "Failed trajectories: an error of the service itself",
    "failed_invalid_input": "Failed trajectories: their prompt cannot be answered as it is",
    "failed_timeout": "Failed trajectories: out of time",
    "failed_trajectories": "Trajectories with a status other than OK: in no loss, whatever the reason",
    "generate_seconds": "Time of trajectories in the engine",
    "generated_tokens": "Tokens that the policy sampled, of all trajectories that ended",
    "groups_done": "Groups written to the stream of trajectories",
    "groups_duplicated": "Groups that another worker had written before",
    "groups_failed": "Groups given up after several runs, written with a failed status",
    "groups_reclaimed": "Prompts taken over from a worker that fell silent",
    "groups_released": "Prompts left to another worker because their policy was not reached in time",
    "invalid_actions": "Turns without a valid action",
    "policy_failures": "Policies that could not be loaded",
    "policy_pause_seconds": "Time that generation stood still for new weights",
    "policy_updates": "Policies loaded",
    "prompt_tokens": "Prompt tokens of requests, those in the prefix cache included",
    "redis_waits": "Calls that found Redis away and were repeated",
    "requests": "Generations asked of the engine",
    "restarts": "Times that a dispatcher began anew after an error that nobody foresaw",
    "retrieve_seconds": "Time of trajectories in the environment",
    "runs_repeated": "Runs of a group that failed and were repeated",
    "sampled_tokens": "Tokens that the engine sampled, those of generations that were given up included",
    "score_seconds": "Time of trajectories in the reward",
    "searches": "Valid searches of trajectories",
    "spans_dropped": "Spans of agents and dispatchers that did not reach the collector of traces",
    "trajectories": "Trajectories that ended, failed ones included",
    "truncated_trajectories": "Trajectories cut at a limit of length",
    "turns": "Turns of trajectories",
    "unfinished_trajectories": "Trajectories that ended without an answer",
    "wait_seconds": "Time of trajectories between their issue and their start",
}
_LABELLED = {
    "call_retries": ("service",),
    "calls_given_up": ("service",),
    "circuit_open": ("service",),
    "circuits_opened": ("service",),
    "replicas": ("deployment",),
    "spans_dropped": ("reason",),
}
_LABELS = re.compile(r'(\w+)="([^"]*)"')
_VERSION = "tokens_of_version"
_VERSIONS_KEPT = 32
_STALENESS = (0, 1, 2, 3, 4, 8, 16)


def count_name(name: str, **labels: object) -> str:
    """The name of a count with labels."""
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


def call_counts() -> dict[str, float]:
    """Calls of this process that were repeated or given up, and the circuits of the services that it calls."""
    metrics: dict[str, Counter | Gauge] = {
        "call_retries": RETRIED,
        "calls_given_up": GIVEN_UP,
        "circuits_opened": OPENED,
        "circuit_open": OPEN,
    }
    return _counts(metrics)


def span_counts() -> dict[str, float]:
    """Spans of this process that did not reach the collector."""
    return _counts({"spans_dropped": DROPPED})


def _counts(metrics: Mapping[str, Counter | Gauge]) -> dict[str, float]:
    return {
        count_name(name, **sample.labels): sample.value
        for name, metric in metrics.items()
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


class VersionTokens:
    """Tokens that were sampled under each of the latest versions of the policy."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], int] = {}

    def add(self, group: TrajectoryGroup) -> None:
        """Count what the group was sampled under."""
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                key = (segment.epoch, segment.version)
                self._tokens[key] = self._tokens.get(key, 0) + segment.end - segment.begin
        for old in sorted(self._tokens)[:-_VERSIONS_KEPT]:
            del self._tokens[old]

    @property
    def counts(self) -> dict[str, float]:
        return {count_name(_VERSION, epoch=e, version=v): n for (e, v), n in self._tokens.items()}


@dataclass(frozen=True)
class Snapshot:
    """What one replica says of itself.

    Attributes:
        replica: names its process; a replica that starts again has another name.
        counts: since it started.
        serving: engines only; None = nothing published.
    """

    replica: str
    counts: Counts
    serving: Policy | None = None


class Totals:
    """Sums over replicas. Those that only grow go on growing when a replica ends or starts again."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}
        self._sums: dict[str, float] = {}

    def add(self, snapshots: Iterable[Snapshot]) -> dict[str, float]:
        """All sums after another look at the replicas."""
        gauges: dict[str, float] = {}
        for snapshot in snapshots:
            for name, value in snapshot.counts.items():
                base = name.partition("{")[0]
                if base in _GAUGES:
                    gauges[name] = gauges.get(name, 0.0) + value
                elif base != _VERSION:
                    key = (snapshot.replica, name)
                    self._sums[name] = self._sums.get(name, 0.0) + max(0.0, value - self._seen.get(key, 0.0))
                    self._seen[key] = value
        return self._sums | gauges


@dataclass
class Staleness:
    """How many versions behind the announced policy tokens were sampled, looked at when their group ended."""

    tokens: dict[int, float] = field(default_factory=dict)
    _seen: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, snapshots: Iterable[Snapshot], announced: Policy | None) -> None:
        """Count the tokens since the last look. Before anything is announced there is nothing to be behind of."""
        seen: dict[tuple[str, str], float] = {}
        for snapshot in snapshots:
            for name, value in snapshot.counts.items():
                if not name.startswith(_VERSION):
                    continue
                key = (snapshot.replica, name)
                seen[key] = value
                labels = dict(_LABELS.findall(name))
                if announced is not None and int(labels["epoch"]) == announced.epoch:
                    behind = max(0, announced.version - int(labels["version"]))
                    new = value - self._seen.get(key, 0.0)
                    self.tokens[behind] = self.tokens.get(behind, 0.0) + new
        self._seen |= seen

    def histogram(self) -> Metric:
        """Cumulative, as Prometheus has it."""
        buckets = [(str(float(most)), sum(n for b, n in self.tokens.items() if b <= most)) for most in _STALENESS]
        buckets.append(("+Inf", sum(self.tokens.values())))
        total = sum(behind * n for behind, n in self.tokens.items())
        text = "Sampled tokens by the versions that their policy was behind the announced one"
        return HistogramMetricFamily(_PREFIX + "token_staleness", text, buckets, total)


class Shown(Collector):
    """What `/metrics` shows of the last look at all replicas. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._staleness = Staleness()
        self._counts: dict[str, float] = {}
        self._serving: Policy | None = None
        self._announced: Policy | None = None
        self._replicas: dict[str, Policy] = {}

    def update(
        self,
        snapshots: Mapping[str, Iterable[Snapshot]],
        serving: Policy | None,
        announced: Policy | None,
        queues: Mapping[str, int] | None = None,
    ) -> None:
        """Replace what is shown.

        Args:
            snapshots: of the replicas of each deployment.
            serving: the oldest policy that an engine serves.
            announced: what engines are to serve.
            queues: entries of streams, by the name of their gauge.
        """
        every = [snapshot for replicas in snapshots.values() for snapshot in replicas]
        with self._lock:
            self._counts = self._totals.add(every)
            self._counts |= {count_name("replicas", deployment=n): len(list(r)) for n, r in snapshots.items()}
            self._counts |= queues or {}
            self._staleness.add(every, announced)
            self._replicas = {s.replica: s.serving for s in every if s.serving is not None}
            self._serving, self._announced = serving, announced

    def get(self, name: str) -> int:
        """One count of the last look; 0 before there is any."""
        with self._lock:
            return int(self._counts.get(name, 0))

    def describe(self) -> Iterator[Metric]:
        """Every metric that there may be, without a value."""
        for base in sorted(_GAUGES | _HELP):
            yield _family(base, _LABELLED.get(base, ()))
        yield Staleness().histogram()
        yield from _policies(Policy(), Policy(), {})

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, serving, announced = dict(self._counts), self._serving, self._announced
            replicas = self._replicas
            histogram = self._staleness.histogram()
        yield from families(counts)
        yield histogram
        yield from _policies(serving or Policy(), announced, replicas)


def _policies(served: Policy, announced: Policy | None, replicas: Mapping[str, Policy]) -> Iterator[Metric]:
    yield GaugeMetricFamily(_PREFIX + "policy_version", "Policy version that every engine serves", served.version)
    yield GaugeMetricFamily(_PREFIX + "policy_epoch", "Epoch of the policy that every engine serves", served.epoch)
    if announced is not None:
        text = "Policy version that the trainer announced last"
        yield GaugeMetricFamily(_PREFIX + "policy_announced_version", text, announced.version)
    text = "Policy version that one engine serves"
    each = GaugeMetricFamily(_PREFIX + "replica_policy_version", text, labels=["replica"])
    for replica, policy in replicas.items():
        each.add_metric([replica], policy.version)
    yield each


def families(counts: Counts) -> Iterator[Metric]:
    """One metric for each name, with a sample for each set of labels."""
    grouped: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, value in sorted(counts.items()):
        base, _, labels = name.partition("{")
        grouped.setdefault(base, []).append((dict(_LABELS.findall(labels)), value))
    for base, samples in grouped.items():
        family = _family(base, samples[0][0])
        for labels_of, value in samples:
            family.add_metric(list(labels_of.values()), value)
        yield family


def _family(base: str, labels: Iterable[str]) -> GaugeMetricFamily | CounterMetricFamily:
    text = _GAUGES.get(base) or _HELP.get(base) or base.replace("_", " ").capitalize()
    return (GaugeMetricFamily if base in _GAUGES else CounterMetricFamily)(_PREFIX + base, text, labels=[*labels])
