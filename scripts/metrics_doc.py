"""Generates docs/reference/metrics.md from the metrics that the code registers, each service in its own environment.

.venvs/cli/bin/python scripts/metrics_doc.py               writes the page
.venvs/<service>/bin/python scripts/metrics_doc.py NAME    prints the metrics of one service as JSON
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from tools import HOMES

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs/reference/metrics.md"
SERVICES = {
    "trainer": "At `trainer.health_address`. Gauges describe the last optimizer step, and are 0 before the first.",
    "rollout": "At `rollout.health_address`, summed over all replicas of engine, agent and dispatcher every second.\n"
    "A counter does not fall when a replica restarts.",
    "retriever": "At `retriever.http_address`.",
    "reward": "At `reward.health_address`, summed over all workers.",
    "console": "At `console.http_address`.",
    "common": "Of every service that calls others or has a health endpoint, besides its own.",
}
_SUFFIX = {"counter": "_total", "info": "_info"}
_INTRODUCTION = """# Metrics

Every metric of every service, with type, labels and meaning. Each service exposes its own for Prometheus:

```
curl localhost:18641/metrics      # the trainer; retriever 18610, reward 18621, rollout 18631, console 18650
```

Scrape each service under a job of its name (`job="trainer"`, …), as compose and the chart do: the dashboards
(`deploy/grafana`) and the alerts (`deploy/prometheus/rules`, [runbooks](../runbooks/README.md)) expect that.

- A histogram `x` is the series `x_bucket`, `x_sum` and `x_count`.
- Every counter and histogram also has `x_created`, the time of its first count.
- A counter of events that have not happened yet is 0, unless its label is only known with the event.
- Python's own `python_*` and `process_*` are included, except from a reward with several workers.

`make reference` generates this page from the code; a test checks that it is current.

## Dashboards

Compose provisions the dashboards, and the chart installs them for Grafana's sidecar (`monitoring.dashboards`).
Elsewhere import `deploy/grafana/dashboards/*.json`. Open **Pipeline** first. Each dashboard has a variable for
Prometheus and one for the namespace; those of one service also have one for its instances. They link to each other.

| dashboard | shows |
|---|---|
| Pipeline | who waits for whom, queues, throughput, staleness, engine versions, what is lost or recovered |
| Training | reward, exact match, KL, entropy, clipping, gradient, trainer against engine, lengths, step time |
| Rollout | tokens, requests, prefix cache, where a trajectory's time goes, weights, recovery |
| Retriever | latency, errors, queue, batches, cache, which index |
| Reward | scores by component, infrastructure failures, latency, canaries |
| Redis | persistence, memory, slow commands; needs redis_exporter |

`make dashboards` generates them from the code in `deploy/grafana/forage_dashboards`.
"""
EXPORTED = {
    "redis_up": ("gauge", "1 where the exporter reaches Redis"),
    "redis_uptime_in_seconds": ("gauge", "Time since Redis started"),
    "redis_connected_clients": ("gauge", "Connections"),
    "redis_blocked_clients": ("gauge", "Connections that wait for an entry of a stream"),
    "redis_memory_used_bytes": ("gauge", "Memory in use"),
    "redis_memory_max_bytes": ("gauge", "`maxmemory`; 0 = no limit"),
    "redis_commands_processed_total": ("counter", "Commands"),
    "redis_commands_total": ("counter", "Commands by name", "cmd"),
    "redis_commands_duration_seconds_total": ("counter", "Time in commands by name", "cmd"),
    "redis_slowlog_length": ("gauge", "Entries of the slow log"),
    "redis_aof_enabled": ("gauge", "1 where the append-only file is on"),
    "redis_aof_last_write_status": ("gauge", "1 where the last write to the append-only file went well"),
    "redis_aof_current_size_bytes": ("gauge", "Size of the append-only file"),
    "redis_aof_rewrite_in_progress": ("gauge", "1 while the append-only file is rewritten"),
    "redis_aof_last_bgrewrite_status": ("gauge", "1 where its last rewrite went well"),
    "redis_rejected_connections_total": ("counter", "Connections refused because of `maxclients`"),
    "redis_evicted_keys_total": ("counter", "Keys evicted: streams and ledger must never be"),
    "redis_net_input_bytes_total": ("counter", "Bytes received"),
    "redis_net_output_bytes_total": ("counter", "Bytes sent"),
    "redis_db_keys": ("gauge", "Keys", "db"),
    "redis_latest_fork_seconds": ("gauge", "Time that the last fork, of a rewrite, took"),
}
"""Metrics of redis_exporter that dashboards and alerts read: (type, meaning, labels)."""


@dataclass(frozen=True)
class MetricDescription:
    """One metric: name as in queries, prometheus_client's name of its type, labels, help text."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str

    def __str__(self) -> str:
        labels = ", ".join(f"`{label}`" for label in self.labels) or "–"
        return f"| `{self.name}` | {self.type} | {labels} | {self.help} |"


def collect_metrics(service: str) -> list[MetricDescription]:
    """Collect the metrics of a service from its package and its libraries; sorted by name.

    The environment must be that of the service; of `common`, the metrics of every service, that of the command.

    Raises:
        ValueError: a metric lacks a help text, or its name does not start with `forage_<service>_`.
    """
    libraries = [REPOSITORY / library / f"forage_{Path(library).name}" for library in _list_libraries(service)]
    modules = [module for library in libraries for module in _import_modules(library, is_library=True)]
    if service != "common":
        modules += _import_modules(HOMES[service] / f"forage_{service}")
    known = tuple(f"forage_{name}_" for name in SERVICES)
    metrics = {metric.name: metric for module in modules for metric in _describe(module)}
    for metric in metrics.values():
        if not metric.name.startswith(known) or not metric.help:
            raise ValueError(f"{metric.name} ({metric.help!r}): expected forage_<service>_… and a help text")
    return [metrics[name] for name in sorted(metrics) if name.startswith(f"forage_{service}_")]


def _list_libraries(service: str) -> list[str]:
    """List the folders of the libraries that an environment has."""
    requirements = HOMES["cli" if service == "common" else service] / "requirements.in"
    return re.findall(r"(?m)^-r (?:\.\./)+(libs/\w+)/base\.in$", requirements.read_text(encoding="utf-8"))


def _import_modules(package: Path, is_library: bool = False) -> Iterator[ModuleType]:
    """Import every module that uses prometheus_client.

    Args:
        is_library: modules for other services are passed over: this environment lacks packages that they import.
    """
    for file in sorted(package.rglob("*.py")):
        if re.search(r"^from prometheus_client", file.read_text(encoding="utf-8"), re.M):
            try:
                yield importlib.import_module(".".join(file.relative_to(package.parent).with_suffix("").parts))
            except ModuleNotFoundError:
                if not is_library:
                    raise


def _describe(module: ModuleType) -> Iterator[MetricDescription]:
    """Describe the metrics of a module: global variables, values of dicts, and custom collectors."""
    from prometheus_client.core import Metric
    from prometheus_client.metrics import MetricWrapperBase
    from prometheus_client.registry import Collector

    values = [v for value in vars(module).values() for v in (value.values() if isinstance(value, dict) else [value])]
    for value in values:
        families: Iterable[Metric] = ()
        labels = None
        if isinstance(value, MetricWrapperBase):
            families, labels = value.describe(), value._labelnames
        elif isinstance(value, type) and Collector in value.__mro__ and value.__module__ == module.__name__:
            families = value().describe() if MetricWrapperBase not in value.__mro__ else ()
        for family in families:
            name = family.name + _SUFFIX.get(family.type, "")
            names = labels if labels is not None else getattr(family, "_labelnames", ())
            yield MetricDescription(name, family.type, tuple(names), family.documentation)


def render_section(service: str, metrics: Iterable[MetricDescription]) -> str:
    """Render the section of one service."""
    title = "Every service" if service == "common" else service.capitalize()
    rows = "\n".join(map(str, metrics))
    return f"## {title}\n\n{SERVICES[service]}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n{rows}\n"


def render_external_sections() -> str:
    """Render the sections about Redis and Ray, whose metrics other programs expose."""
    metrics = (MetricDescription(name, kind, tuple(labels), text) for name, (kind, text, *labels) in EXPORTED.items())
    rows = "\n".join(map(str, metrics))
    return (
        "## Redis\n\nMetrics of redis_exporter that the dashboards and alerts read, where it is deployed.\n\n"
        f"| name | type | labels | meaning |\n|---|---|---|---|\n{rows}\n\n"
        "## Ray\n\nRay's own metrics (`ray_*`) are at port 8080 of every node where the chart runs a Ray cluster (its\n"
        "PodMonitor scrapes them). vLLM's metrics are not exposed: the table of the rollout has those of the engine.\n"
    )


def read_series_names() -> set[str]:
    """Read the names of all series on the page; a histogram has three."""
    names: set[str] = set()
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", DOCUMENT.read_text(encoding="utf-8"), re.M):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def _write() -> None:
    parts = [_INTRODUCTION]
    for service in SERVICES:
        environment = "cli" if service == "common" else service
        command = [str(REPOSITORY / f".venvs/{environment}/bin/python"), __file__, service]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout
        metrics = json.loads(output.splitlines()[-1])
        descriptions = [MetricDescription(**metric | {"labels": tuple(metric["labels"])}) for metric in metrics]
        parts.append(render_section(service, descriptions))
    DOCUMENT.write_text("\n".join([*parts, render_external_sections()]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write(json.dumps([asdict(metric) for metric in collect_metrics(sys.argv[1])]) + "\n")
    else:
        _write()
