"""The chart, rendered: values that are tried, and what comes out of them."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from deployment_tools import HELMS, REPOSITORY, helm

CHART = REPOSITORY / "deploy/helm/forage"
NAMESPACE = "training"
DIGEST = "sha256:" + "0" * 64
Object = dict[str, Any]

_EXISTING = {
    "image": {"pullSecrets": ["registry"], "registry": "registry.example", "tag": "1.2.3"},
    "objectStore": {"existingSecret": "bucket", "env": [{"name": "AWS_REGION", "value": "eu-central-1"}]},
    "fetch": [
        {"url": "s3://bucket/indexes/wiki", "path": "indexes/wiki", "for": ["retriever"]},
        {"url": "s3://bucket/models/policy.tar", "path": "models/policy", "for": ["rollout", "trainer"]},
    ],
    "monitoring": {
        "labels": {"release": "prometheus"},
        "serviceMonitor": {"enabled": True},
        "rules": {"enabled": True},
        "dashboards": {"enabled": True},
    },
}
_PLACE = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "training",
    "runtimeClassName": "nvidia",
    "podAnnotations": {"example.com/team": "search"},
    "extraEnv": [{"name": "OTEL_SDK_DISABLED", "value": "true"}],
}
_FETCHED = {"model": {"path": "/data/models/policy"}, "retriever": {"index": "/data/indexes/wiki"}}

MATRIX: dict[str, Mapping[str, Any] | Path] = {
    "defaults": {},
    "local": CHART / "values-local.yaml",
    "gpu-small": CHART / "values-gpu-small.yaml",
    "gpu-large": CHART / "values-gpu-large.yaml",
    "every option on": {
        **_EXISTING,
        "settings": _FETCHED
        | {
            "rollout": {"drain_timeout_s": 40.5, "n": 4},
            "tracing": {"enabled": True, "endpoint": "http://collector.monitoring:4317", "sample_ratio": 0.1},
        },
        "cli": {"image": {"digest": DIGEST}},
        "fetcher": {"image": {"repository": "rclone", "digest": DIGEST}},
        "retriever": {
            **_PLACE,
            "image": {"digest": DIGEST},
            "gpu": {"count": 1},
            "autoscaling": {"enabled": True},
            "data": {"kind": "ephemeral", "storageClassName": "local-nvme"},
        },
        "reward": {**_PLACE, "image": {"digest": DIGEST}, "autoscaling": {"enabled": True}},
        "rollout": {
            **_PLACE,
            "image": {"digest": DIGEST},
            "gpu": {"count": 1},
            "keda": {"enabled": True, "prometheusAddress": "http://prometheus.monitoring:9090"},
        },
        "trainer": {**_PLACE, "image": {"digest": DIGEST}, "gpu": {"count": 4}},
        "redis": {**_PLACE, "image": {"digest": DIGEST}, "exporter": {"enabled": True, "image": {"digest": DIGEST}}},
        "storage": {"shared": {"storageClassName": "nfs"}},
        "networkPolicy": {
            "clients": {"rollout": [{"namespaceSelector": {"matchLabels": {"team": "search"}}}]},
            "extraEgress": {"reward": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}]},
        },
    },
    "every option off": {
        "world": {"enabled": False},
        "settings": {"rollout": {"n": 2}, "trainer": {"max_staleness": 0, "val_before_train": False}},
        "retriever": {"pdb": {"enabled": False}, "topologySpread": {"enabled": False}},
        "reward": {"pdb": {"enabled": False}, "topologySpread": {"enabled": False}},
        "rollout": {"pdb": {"enabled": False}, "topologySpread": {"enabled": False}, "auth": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "storage": {"shared": {"keep": False}},
    },
    "everything elsewhere": {
        "settings": {
            "retriever": {"http_address": "search.example:18610"},
            "reward": {"grpc_address": "judge.example:18620"},
        },
        "retriever": {"enabled": False},
        "reward": {"enabled": False},
        "redis": {"enabled": False, "external": {"url": "rediss://redis.example:6379/0"}},
        "rollout": {"auth": {"existingSecret": "token"}},
        "storage": {"shared": {"existingClaim": "team-volume"}},
    },
    "Redis by a Secret, Ray for the rollout": {
        **_EXISTING,
        "settings": _FETCHED | {"rollout": {"engine_replicas": {"min": 1, "max": 4}}},
        "redis": {"enabled": False, "external": {"existingSecret": "redis-url"}},
        "ray": {"auth": {"existingSecret": "ray-token"}},
        "rollout": {
            **_PLACE,
            "mode": "rayservice",
            "gpu": {"count": 2},
            "rayservice": {
                "workers": {"replicas": 1, "minReplicas": 1, "maxReplicas": 2},
            },
        },
    },
    "Ray on CPUs, without a front": {
        "rollout": {"mode": "rayservice", "rayservice": {"front": {"enabled": False}}},
        "redis": {"auth": {"existingSecret": "redis-password"}},
    },
    "Ray for the trainer": {**_EXISTING, "settings": _FETCHED, "trainer": {**_PLACE, "mode": "rayjob", "nodes": 2}},
    "probes in training": {"settings": {"trainer": {"probe": {"freq": 10}}}},
    "serve only": {"trainer": {"mode": "none"}, "retriever": {"data": {"kind": "shared"}}},
    "train only": {"rollout": {"mode": "none"}, "retriever": {"enabled": False}, "reward": {"enabled": False}},
    "retriever only": {
        "retriever": {"data": {"kind": "claim", "existingClaim": "index"}, "gpu": {"count": 1}},
        "reward": {"enabled": False},
        "rollout": {"mode": "none"},
        "trainer": {"mode": "none"},
        "redis": {"enabled": False},
    },
    "an index in memory, KEDA by the stream alone": {
        "retriever": {"data": {"kind": "memory", "size": "8Gi"}},
        "rollout": {"keda": {"enabled": True}},
    },
}
"""Name → values, or the file that has them."""

NEWEST = list(HELMS)[-1]


def template(
    values: Mapping[str, Any] | Path, version: str = NEWEST, *options: str
) -> subprocess.CompletedProcess[str]:
    """`helm template`, whatever comes of it."""
    text = values.read_text() if isinstance(values, Path) else json.dumps(values)
    command = [
        str(helm(version)),
        "template",
        "forage",
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--values",
        "-",
        *options,
    ]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


@functools.cache
def rendered(name: str, version: str = NEWEST) -> tuple[Object, ...]:
    """The objects that values of the matrix give."""
    done = template(MATRIX[name], version)
    assert done.returncode == 0, done.stderr
    return tuple(filter(None, yaml.load_all(done.stdout, yaml.CSafeLoader)))


def title(thing: Object) -> str:
    """Kind and name, for messages."""
    return f"{thing['kind']}/{thing['metadata']['name']}"


def one(objects: tuple[Object, ...], kind: str, name: str = "") -> Object:
    """The only object of a kind, or the one whose name ends so."""
    found = [thing for thing in objects if thing["kind"] == kind and thing["metadata"]["name"].endswith(name)]
    assert len(found) == 1, f"{len(found)} of {kind} …{name}"
    return found[0]


def settings_text(objects: tuple[Object, ...]) -> str:
    """The settings file of the services."""
    text: str = one(objects, "ConfigMap", "forage-settings")["data"]["settings.yaml"]
    return text


def pods(thing: Object) -> Iterator[tuple[str, Object]]:
    """(where, {metadata, spec}) of every pod that an object describes."""
    if thing["kind"] == "Pod":
        yield "", {"metadata": thing["metadata"], "spec": thing["spec"]}

    def walk(node: Any, path: str) -> Iterator[tuple[str, Object]]:
        if isinstance(node, dict):
            if "containers" in node.get("spec", {}) and path:
                yield path, {"metadata": node.get("metadata", {}), "spec": node["spec"]}
                return
            for key, child in node.items():
                yield from walk(child, f"{path}.{key}")
        elif isinstance(node, list):
            for index, child in enumerate(node):
                yield from walk(child, f"{path}[{index}]")

    yield from walk(thing.get("spec", {}), ".spec")


def containers(spec: Object) -> Iterator[tuple[Object, bool]]:
    """(container, whether it runs before the others) of a pod."""
    for container in spec.get("initContainers", []):
        yield container, True
    for container in spec["containers"]:
        yield container, False
