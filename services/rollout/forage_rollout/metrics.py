"""Prometheus metrics of the whole service: a collector that sums what the replicas of all deployments report."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forage_proto.v1.trajectory_pb2 import Policy, TrajectoryGroup
from forage_runtime.clients.calls import GIVEN_UP, RETRIED
from forage_runtime.clients.circuit import OPEN, OPENED
from forage_runtime.clients.concurrency import QUEUED
from forage_runtime.telemetry.trace_context import DROPPED

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CountKey = tuple[str, ...]
"""The name of a count, then the value of each of its labels in the order of `_LABELS`."""
Counts = Mapping[CountKey, float]
_PREFIX = "forage_rollout_"
_GAUGES = {
    "asleep": "Engines that sleep without memory while the trainer computes on their GPUs",
    "backpressure": "1 while no prompts are claimed because groups that wait for the trainer reach this limit",
    "cache_tokens": "Tokens whose keys and values the engines' caches hold at most",
    "cache_tokens_used": "Tokens of running sequences in those caches",
    "calls_queued": "Calls that wait until their process has a connection to the service free",
    "circuit_open": "Circuits that are open: the service is left alone for a moment",
    "engine_links": "Connections of agents to engines on which generations may be asked",
    "freed_bytes": "GPU memory that engines freed when they fell asleep last; 0 on CPU",
    "groups_in_flight": "Prompts being worked on",
    "groups_limit": "Most prompts that dispatchers work on now: the limit that follows the engines",
    "groups_limit_reason": "Dispatchers whose limit moved last, or stays, for this reason",
    "out_of_service": "Engines that do not serve: the announced policy could not be loaded",
    "paused": "Engines that stand still",
    "prompts_on_stream": "Prompts on the stream: those that wait, and those being worked on",
    "replicas": "Processes of a deployment that answer",
    "requests_in_flight": "Generations waiting or running in the engine",
    "requests_running": "Generations that the engine samples from",
    "requests_waiting": "Generations that wait within the engine",
    "samples_in_flight": "Trajectories being worked on",
    "sessions_waiting": "Sessions that wait for a worker",
    "trajectories_on_stream": "Groups on the stream until the trainer has a checkpoint of their step",
}
_COUNTERS = {
    "adapter_loads": "LoRA adapters loaded",
    "asleep_seconds": "Time that engines slept without memory while the trainer computed on their GPUs",
    "backpressure_seconds": "Time without new prompts because the trainer has not read what was written",
    "busy_seconds": "Time of engines with at least one request",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache: its hits; prompt_tokens are its queries",
    "call_retries": "Attempts to call a service that failed and were repeated",
    "calls_given_up": "Calls of a service that failed for good",
    "canary_failures": "Loaded policies whose log-probabilities of a few tokens were not the trainer's",
    "canary_seconds": "Time in which loaded policies were compared with the trainer's before they were served",
    "circuits_opened": "Times that a service was left alone after failures in a row",
    "direct_fallbacks": "Folders of policies that the trainer was to send, and that were read instead",
    "direct_transfers": "Folders of policies that the trainer, or another engine, sent to this service",
    "environment_failures": "Trajectories that failed because the code of their environment raised",
    "evictions": "Sequences that ran and whose keys and values found no room: evicted, and computed again",
    "failed_internal": "Failed trajectories: an error of the service itself",
    "failed_invalid_input": "Failed trajectories: their prompt cannot be answered as it is",
    "failed_timeout": "Failed trajectories: out of time",
    "failed_trajectories": "Trajectories with a status other than OK: in no loss, whatever the reason",
    "fresh_loads": "Policies that vLLM was started with, because they could not be loaded in place",
    "generate_seconds": "Time of trajectories in the engine",
    "generated_tokens": "Tokens that the policy sampled, of all trajectories that ended",
    "generations_repeated": "Generations asked of another engine because theirs died, or the connection to it",
    "groups_done": "Groups written to the stream of trajectories",
    "groups_duplicated": "Groups that another worker had written before",
    "groups_failed": "Groups given up after several runs, written with a failed status",
    "groups_limit_lowered": "Times that a dispatcher lowered its limit: engines evicted sequences that ran",
    "groups_limit_raised": "Times that a dispatcher raised its limit: engines had room",
    "groups_reclaimed": "Prompts taken over from a worker that fell silent",
    "groups_released": "Prompts left to another worker because their policy was not reached in time",
    "invalid_actions": "Turns without a valid action",
    "links_lost": "Connections of agents to engines that ended although the engine was not leaving",
    "loop_late_seconds": "Time by which the looks below came too late: a loop that is late has too much to do",
    "loop_looks": "Looks at the event loops of a deployment, ten a second",
    "policy_failures": "Policies that could not be loaded",
    "policy_pause_seconds": "Time that generation stood still for new weights",
    "policy_stage_seconds": "Time in which new policies were made ready while the old ones were served",
    "policy_updates": "Policies loaded",
    "policy_wait_seconds": "Time that new weights waited for the engine's running step to end",
    "prompt_tokens": "Prompt tokens of requests, those in the prefix cache included",
    "redis_waits": "Calls that were repeated because Redis was unavailable",
    "requests": "Generations asked of the engine",
    "repeated_tokens": "Tokens of generations that replaced lost ones: at most so many were sampled twice",
    "restarted_trajectories": "Trajectories begun again in drain mode, as another policy would have gone on with them",
    "restarts": "Restarts of a dispatcher after an unexpected error",
    "retrieve_seconds": "Time of trajectories in the environment",
    "runs_repeated": "Runs of a group that failed and were repeated",
    "sampled_tokens": "Tokens that the engine sampled, those of generations that were given up included",
    "score_seconds": "Time of trajectories in the reward",
    "searches": "Valid searches of trajectories",
    "session_tokens_lost": "Tokens sampled in sessions that were begun again",
    "sessions_repeated": "Sessions begun again because their worker fell silent",
    "sleeps": "Times that engines fell asleep",
    "spans_dropped": "Spans of agents and dispatchers that did not reach the collector of traces",
    "trajectories": "Trajectories that ended, failed ones included",
    "truncated_trajectories": "Trajectories cut at a limit of length",
    "turns": "Turns of trajectories",
    "unfinished_trajectories": "Trajectories that ended without an answer",
    "wait_seconds": "Time of trajectories between their issue and their start",
    "writes_repeated": "Writes of a finished group that failed unexpectedly and were repeated",
}
_LABELS = {
    "backpressure": ("reason",),
    "call_retries": ("service",),
    "calls_given_up": ("service",),
    "calls_queued": ("service",),
    "circuit_open": ("service",),
    "circuits_opened": ("service",),
    "groups_limit_reason": ("reason",),
    "loop_late_seconds": ("deployment",),
    "loop_looks": ("deployment",),
    "replicas": ("deployment",),
    "spans_dropped": ("reason",),
}
_VERSIONS_KEPT = 32
_STALENESS_BUCKETS = (0, 1, 2, 3, 4, 8, 16)


def to_counts(fields: DataclassInstance) -> dict[CountKey, float]:
    """The fields of a dataclass as counts without labels."""
    return {(name,): value for name, value in asdict(fields).items()}


def read_call_counts() -> dict[CountKey, float]:
    """Calls of this process that were repeated or given up, or wait here, and the circuits of what it calls."""
    metrics: dict[str, Counter | Gauge] = {
        "call_retries": RETRIED,
        "calls_given_up": GIVEN_UP,
        "calls_queued": QUEUED,
        "circuits_opened": OPENED,
        "circuit_open": OPEN,
    }
    return _read(metrics)


def read_span_counts() -> dict[CountKey, float]:
    """Spans of this process that did not reach the collector of traces."""
    return _read({"spans_dropped": DROPPED})


def _read(metrics: Mapping[str, Counter | Gauge]) -> dict[CountKey, float]:
    return {
        (name, *(sample.labels[label] for label in _LABELS[name])): sample.value
        for name, metric in metrics.items()
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


class VersionTokens:
    """Tokens that were sampled under each of the latest versions of the policy.

    Attributes:
        counts: (epoch, version) → tokens.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}

    def add_group(self, group: TrajectoryGroup) -> None:
        """Count the tokens of the group by the policy that sampled them."""
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                key = (segment.epoch, segment.version)
                # The latest goes last: after a lost Redis volume its epoch may be lower than those before.
                self.counts[key] = self.counts.pop(key, 0) + segment.end - segment.begin
        for old in list(self.counts)[:-_VERSIONS_KEPT]:
            del self.counts[old]


@dataclass(frozen=True)
class Snapshot:
    """Metrics of one replica, as it reports them.

    Attributes:
        replica: names its process; a replica that is started again has another name.
        counts: since it started.
        serving: engines only; None = nothing published.
        version_tokens: agents only, see `VersionTokens.counts`.
        notes: dispatchers only: what holds their work up, by topic.
        waits: see `list_waits`.
        difference: engines only; see `VllmEngine.difference`.
    """

    replica: str
    counts: Counts
    serving: Policy | None = None
    version_tokens: Mapping[tuple[int, int], int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    waits: Sequence[dict[str, Any]] = ()
    difference: float | None = None


class RolloutCollector(Collector):
    """`/metrics` as of the last snapshots of all replicas. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, Any], float] = {}
        self._totals: dict[CountKey, float] = {}
        self._gauges: dict[CountKey, float] = {}
        self._stale_tokens: dict[int, float] = {}  # versions behind the announced one → tokens
        self._serving: Policy | None = None
        self._announced: Policy | None = None
        self._replicas: dict[str, Policy] = {}
        self._differences: dict[str, float] = {}

    def update(
        self,
        snapshots: Mapping[str, Sequence[Snapshot]],
        serving: Policy | None,
        announced: Policy | None,
        queues: Mapping[str, int] | None = None,
    ) -> None:
        """Replace what is shown.

        Args:
            snapshots: of the replicas of each deployment.
            serving: the oldest policy that an engine serves.
            announced: the policy that engines are to serve.
            queues: entries of streams, by the name of their gauge.
        """
        with self._lock:
            self._gauges = {("replicas", deployment): len(found) for deployment, found in snapshots.items()}
            self._gauges |= {(name,): entries for name, entries in (queues or {}).items()}
            self._replicas, self._differences = {}, {}
            for snapshot in itertools.chain.from_iterable(snapshots.values()):
                self._add_counts(snapshot)
                self._add_stale_tokens(snapshot, announced)
                if snapshot.serving is not None:
                    self._replicas[snapshot.replica] = snapshot.serving
                if snapshot.difference is not None:
                    self._differences[snapshot.replica] = snapshot.difference
            self._serving, self._announced = serving, announced

    def get(self, name: str, *labels: str) -> int:
        """One count of the last snapshots; 0 before there are any."""
        with self._lock:
            return int((self._totals | self._gauges).get((name, *labels), 0))

    def describe(self) -> Iterator[Metric]:
        """Every metric that there may be, without a value."""
        yield from map(_build_family, sorted(_GAUGES | _COUNTERS))
        yield _build_staleness({})
        yield from _build_policies(Policy(), Policy(), {}, {})

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, stale_tokens = self._totals | self._gauges, dict(self._stale_tokens)
            serving, announced, replicas = self._serving, self._announced, self._replicas
            differences = self._differences
        for name, samples in itertools.groupby(sorted(counts.items()), key=lambda item: item[0][0]):
            family = _build_family(name)
            for (_, *labels), value in samples:
                family.add_metric(labels, value)
            yield family
        yield _build_staleness(stale_tokens)
        yield from _build_policies(serving or Policy(), announced, replicas, differences)

    def _read_increment(self, replica: str, key: Any, value: float) -> float:
        """Growth of a replica's number since it was read last.

        Sums of it go on growing when a replica ends or is started again, as Prometheus expects of a counter.
        """
        last = self._last.get((replica, key), 0.0)
        self._last[replica, key] = value
        return max(0.0, value - last)

    def _add_counts(self, snapshot: Snapshot) -> None:
        for key, value in snapshot.counts.items():
            if key[0] in _GAUGES:
                self._gauges[key] = self._gauges.get(key, 0.0) + value
            else:
                new = self._read_increment(snapshot.replica, key, value)
                self._totals[key] = self._totals.get(key, 0.0) + new

    def _add_stale_tokens(self, snapshot: Snapshot, announced: Policy | None) -> None:
        """Count new tokens by their staleness now. Before a policy is announced no token can be behind one."""
        for (epoch, version), tokens in snapshot.version_tokens.items():
            new = self._read_increment(snapshot.replica, (epoch, version), tokens)
            if announced is not None and epoch == announced.epoch:
                behind = max(0, announced.version - version)
                self._stale_tokens[behind] = self._stale_tokens.get(behind, 0.0) + new


def _build_family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    family = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
    return family(_PREFIX + name, (_GAUGES | _COUNTERS)[name], labels=_LABELS.get(name, ()))


def _build_staleness(tokens: Mapping[int, float]) -> Metric:
    """A cumulative histogram, as Prometheus stores it, of versions behind → tokens."""
    buckets = [
        (str(float(most)), sum(n for behind, n in tokens.items() if behind <= most)) for most in _STALENESS_BUCKETS
    ]
    buckets.append(("+Inf", sum(tokens.values())))
    total = sum(behind * n for behind, n in tokens.items())
    text = "Sampled tokens by the versions that their policy was behind the announced one"
    return HistogramMetricFamily(_PREFIX + "token_staleness", text, buckets, total)


def _build_policies(
    served: Policy, announced: Policy | None, replicas: Mapping[str, Policy], differences: Mapping[str, float]
) -> Iterator[Metric]:
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
    text = "Mean difference of the trainer's log-probabilities from those of one engine under the policy that it serves"
    each = GaugeMetricFamily(_PREFIX + "replica_canary_difference", text, labels=["replica"])
    for replica, difference in differences.items():
        each.add_metric([replica], difference)
    yield each
