"""Renders the chart: the matrix of tested values, and access to the objects that they give."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from deployment_tools import HELMS, REPOSITORY, find_helm

CHART = REPOSITORY / "deploy/helm/forage"
NAMESPACE = "training"
DIGEST = "sha256:" + "0" * 64
Object = dict[str, Any]

_EXTERNAL = {
    "image": {"pullSecrets": ["registry"], "registry": "registry.example", "tag": "1.2.3"},
    "objectStore": {"existingSecret": "bucket", "env": [{"name": "AWS_REGION", "value": "eu-central-1"}]},
    "fetch": [
        {"url": "s3://bucket/indexes/wiki", "path": "indexes/wiki", "for": ["retriever"]},
        {"url": "s3://bucket/models/policy.tar", "path": "models/policy", "for": ["rollout", "trainer"]},
    ],
    "monitoring": {
        "labels": {"release": "prometheus"},
        "dashboards": {"enabled": True},
    },
}
_SCHEDULING = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "training",
    "runtimeClassName": "nvidia",
    "podAnnotations": {"example.com/team": "search"},
    "extraEnv": [{"name": "OTEL_SDK_DISABLED", "value": "true"}],
    "labels": {"kueue.x-k8s.io/queue-name": "research"},
    "podLabels": {"example.com/cost-center": "7", "app.kubernetes.io/component": "not-this"},
    "schedulerName": "kai-scheduler",
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "extraContainers": [
        {
            "name": "sidecar",
            "image": "sidecar:1",
            "resources": {
                amounts: {"cpu": "10m", "memory": "16Mi", "ephemeral-storage": "1Mi"}
                for amounts in ("requests", "limits")
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
    ],
}
_FETCHED_PATHS = {"model": {"path": "/data/models/policy"}, "retriever": {"index": "/data/indexes/wiki"}}

MATRIX: dict[str, Mapping[str, Any] | Path] = {
    "defaults": {},
    "local": CHART / "values-local.yaml",
    "gpu-small": CHART / "values-gpu-small.yaml",
    "gpu-large": CHART / "values-gpu-large.yaml",
    "every option on": {
        **_EXTERNAL,
        "settings": _FETCHED_PATHS
        | {
            "rollout": {"drain_timeout_s": 40.5, "n": 4, "weights": {"transport": "direct"}},
            "tracing": {"enabled": True, "endpoint": "http://collector.monitoring:4317", "sample_ratio": 0.1},
        },
        "cli": {"image": {"digest": DIGEST}},
        "fetcher": {"image": {"repository": "rclone", "digest": DIGEST}},
        "retriever": {
            **_SCHEDULING,
            "image": {"digest": DIGEST},
            "gpu": {"count": 1},
            "autoscaling": {"enabled": True},
            "data": {"kind": "ephemeral", "storageClassName": "local-nvme"},
        },
        "reward": {**_SCHEDULING, "image": {"digest": DIGEST}, "autoscaling": {"enabled": True}},
        "rollout": {
            **_SCHEDULING,
            "image": {"digest": DIGEST},
            "gpu": {"count": 1},
            "keda": {"enabled": True, "prometheusAddress": "http://prometheus.monitoring:9090"},
        },
        "trainer": {**_SCHEDULING, "image": {"digest": DIGEST}, "gpu": {"count": 4}},
        "redis": {
            **_SCHEDULING,
            "image": {"digest": DIGEST},
            "exporter": {"image": {"digest": DIGEST}},
        },
        "console": {
            **_SCHEDULING,
            "enabled": True,
            "image": {"digest": DIGEST},
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "host": "forage.example",
                "tlsSecret": "forage-tls",
                "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
            },
        },
        "storage": {"shared": {"storageClassName": "nfs"}},
        "networkPolicy": {
            "clients": {
                "rollout": [{"namespaceSelector": {"matchLabels": {"team": "search"}}}],
                "console": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}],
            },
            "extraEgress": {"reward": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}]},
        },
    },
    "every option off": {
        "world": {"enabled": False},
        "settings": {"rollout": {"n": 2}, "trainer": {"max_staleness": 0, "val_before_train": False}},
        "retriever": {"pdb": {"enabled": False}, "topologySpread": {"enabled": False}},
        "reward": {"pdb": {"enabled": False}, "topologySpread": {"enabled": False}},
        "rollout": {"pdb": {"enabled": False}, "topologySpread": {"enabled": False}, "auth": {"enabled": False}},
        "redis": {"exporter": {"enabled": False}},
        "monitoring": {"serviceMonitor": {"enabled": False}, "rules": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "storage": {"shared": {"keep": False}},
    },
    "all dependencies external": {
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
    "Redis URL from a Secret, rollout on Ray": {
        **_EXTERNAL,
        "settings": _FETCHED_PATHS | {"rollout": {"engine_replicas": {"min": 1, "max": 4}}},
        "redis": {
            "enabled": False,
            "external": {"url": "rediss://redis.example:6379/0", "existingSecret": "redis-users"},
        },
        "signing": {"existingSecret": "signing-keys"},
        "ray": {"auth": {"existingSecret": "ray-token"}},
        "rollout": {
            **_SCHEDULING,
            "mode": "rayservice",
            "gpu": {"count": 2},
            "rayservice": {
                "workers": {"replicas": 1, "minReplicas": 1, "maxReplicas": 2},
            },
        },
    },
    "rollout on Ray without GPUs and frontend": {
        "rollout": {"mode": "rayservice", "rayservice": {"front": {"enabled": False}}},
        "redis": {"auth": {"existingSecret": "redis-password"}},
    },
    "trainer on Ray": {
        **_EXTERNAL,
        "settings": _FETCHED_PATHS,
        "trainer": {**_SCHEDULING, "mode": "rayjob", "nodes": 2},
        "signing": {"existingSecret": "signing-keys"},
    },
    "probes during training": {"settings": {"trainer": {"probe": {"freq": 10}}}},
    "TLS by cert-manager, Ray's too": {
        "tls": {
            "enabled": True,
            "requireClientCert": True,
            "certManager": {"enabled": True, "issuerRef": {"name": "private-authority", "kind": "ClusterIssuer"}},
        },
        "ray": {"tls": {"enabled": True}},
        "console": {"enabled": True},
        "rollout": {
            "mode": "rayservice",
            "rayservice": {"workers": {"replicas": 1, "minReplicas": 1, "maxReplicas": 2}},
        },
        "trainer": {"mode": "rayjob", "nodes": 2},
    },
    "TLS and tokens by Secrets": {
        "tls": {"enabled": True, "requireClientCert": True, "existingSecret": "wires"},
        "retriever": {"auth": {"existingSecret": "token"}},
        "reward": {"auth": {"enabled": False}},
        "rollout": {"keda": {"enabled": True}},
    },
    "console": {"console": {"enabled": True, "auth": {"existingSecret": "console-token"}}},
    "serve only": {"trainer": {"mode": "none"}, "retriever": {"data": {"kind": "shared"}}},
    "train only": {"rollout": {"mode": "none"}, "retriever": {"enabled": False}, "reward": {"enabled": False}},
    "retriever only": {
        "retriever": {"data": {"kind": "claim", "existingClaim": "index"}, "gpu": {"count": 1}},
        "reward": {"enabled": False},
        "rollout": {"mode": "none"},
        "trainer": {"mode": "none"},
        "redis": {"enabled": False},
    },
    "index in memory, KEDA by the stream only": {
        "retriever": {
            "data": {"kind": "memory", "size": "8Gi"},
            "autoscaling": {"enabled": True, "prometheusAddress": "http://prometheus.monitoring:9090"},
        },
        "rollout": {"keda": {"enabled": True}},
    },
}
"""Name → values, or the file that contains them."""

NEWEST_HELM = list(HELMS)[-1]


def run_template(
    values: Mapping[str, Any] | Path, version: str = NEWEST_HELM, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run `helm template`, which may fail."""
    text = values.read_text().replace("CHANGE-ME", "bucket") if isinstance(values, Path) else json.dumps(values)
    command = [
        str(find_helm(version)),
        "template",
        "forage",
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--values",
        "-",
        "--api-versions",
        "monitoring.coreos.com/v1",
        *options,
    ]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


@functools.cache
def render(name: str, version: str = NEWEST_HELM) -> tuple[Object, ...]:
    """Render values of the matrix; every pair of values and Helm version is rendered once a session."""
    return render_values(MATRIX[name], version)


def render_values(values: Mapping[str, Any] | Path, version: str = NEWEST_HELM) -> tuple[Object, ...]:
    """Render any values, which must be valid, to objects."""
    ended = run_template(values, version)
    assert ended.returncode == 0, ended.stderr
    return parse_objects(ended.stdout)


def parse_objects(text: str) -> tuple[Object, ...]:
    """Parse the objects that Helm prints."""
    return tuple(filter(None, yaml.load_all(text, yaml.CSafeLoader)))


def describe(item: Object) -> str:
    """Kind and name of an object, for messages."""
    return f"{item['kind']}/{item['metadata']['name']}"


def find_object(objects: tuple[Object, ...], kind: str, suffix: str = "") -> Object:
    """Find the only object of a kind whose name ends with `suffix`."""
    matches = [item for item in objects if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)]
    assert len(matches) == 1, f"{len(matches)} of {kind} …{suffix}"
    return matches[0]


def read_settings(objects: tuple[Object, ...]) -> str:
    """Read the settings file of the services."""
    text: str = find_object(objects, "ConfigMap", "forage-settings")["data"]["settings.yaml"]
    return text


def list_pods(item: Object) -> Iterator[tuple[str, Object]]:
    """List every pod that an object describes: its path in the object, and its metadata and spec."""
    if item["kind"] == "Pod":
        yield "", {"metadata": item["metadata"], "spec": item["spec"]}

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

    yield from walk(item.get("spec", {}), ".spec")


def list_containers(spec: Object) -> Iterator[tuple[Object, bool]]:
    """List the containers of a pod; the second value is true for init containers."""
    for container in spec.get("initContainers", []):
        yield container, True
    for container in spec["containers"]:
        yield container, False
