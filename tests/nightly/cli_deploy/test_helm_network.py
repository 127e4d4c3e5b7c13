"""Network policies, evaluated as Kubernetes does, allow the calls of the architecture and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from helm_chart import MATRIX, NAMESPACE, Object, find_object, list_pods, read_settings, render, render_values
from network_policies import Peer, is_allowed

CALLS: dict[tuple[str, str], set[int]] = {
    ("rollout", "retriever"): {18610, 18611},
    ("rollout", "reward"): {18620},
    ("rollout", "redis"): {6379},
    ("trainer", "redis"): {6379},
    ("trainer", "reward"): {18620},
    ("console", "retriever"): {18610},
    ("console", "reward"): {18620, 18621},
    ("console", "rollout"): {18630, 18631},
    ("console", "trainer"): {18641},
    ("console", "redis"): {6379},
    ("test", "rollout"): {18630, 18631, 18632},
    ("prometheus", "retriever"): {18610},
    ("prometheus", "reward"): {18621},
    ("prometheus", "rollout"): {18631},
    ("prometheus", "trainer"): {18641},
    ("prometheus", "console"): {18650},
    ("prometheus", "redis"): {9121},
}
"""(caller, service) → ports, as in docs/start/architecture.md, and scrapes."""
RANGE = {32768, 52365, 60999}
"""First, another and last port of transfers of policies."""
MORE_CALLS: dict[str, dict[tuple[str, str], set[int]]] = {
    "every option on": {
        ("rollout", "trainer"): {18642, *RANGE},
        ("trainer", "rollout"): RANGE,
        ("rollout", "rollout"): RANGE,
        ("prometheus", "redis"): {9121},
        ("keda", "redis"): {6379},
        ("search", "rollout"): {18630, 18632},
        ("ingress", "console"): {18650},
    },
    "probes during training": {("trainer", "rollout"): {18630, 18632}},
    "TLS and tokens by Secrets": {("keda", "redis"): {6379}},
    "index in memory, KEDA by the stream only": {("keda", "redis"): {6379}},
}
PORTS = sorted({22, 53, 80, 443, 8080, 8265, 52365, 10001, 32767, 61000, *RANGE, 18642}.union(*CALLS.values()))
PARTS = ("retriever", "reward", "rollout", "trainer", "console", "redis", "test")
OUTSIDE = {
    "prometheus": Peer("prometheus", namespace="monitoring"),
    "collector": Peer("collector", namespace="monitoring"),
    "dns": Peer("dns", {"k8s-app": "kube-dns"}, "kube-system"),
    "local dns": Peer("local dns", address="169.254.20.10"),
    "openshift dns": Peer("openshift dns", namespace="openshift-dns"),
    "metadata": Peer("metadata", address="169.254.169.254"),
    "pod identity": Peer("pod identity", address="169.254.170.23"),
    "internet": Peer("internet", address="203.0.113.7"),
    "keda": Peer("keda", namespace="keda"),
    "kuberay": Peer("kuberay", namespace="kuberay-system"),
    "ingress": Peer("ingress", namespace="ingress-nginx"),
    "search": Peer("search", namespace="search", namespace_labels={"team": "search"}),
    "other": Peer("other", namespace="default"),
}


def _list_policies(objects: tuple[Object, ...]) -> list[Object]:
    return [item for item in objects if item["kind"] == "NetworkPolicy"]


def _list_peers(objects: tuple[Object, ...]) -> dict[str, Peer]:
    """The pods of a release by component, with the labels that they have, and those of the test pod."""
    peers = {}
    for item in objects:
        for _, pod in list_pods(item):
            labels = pod["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            peers.setdefault(component, Peer(component, labels, NAMESPACE))
    return peers


def _list_ports(policies: list[Object], source: Peer, target: Peer, protocol: str = "TCP") -> set[int]:
    return {port for port in PORTS if is_allowed(policies, source, target, port, protocol)}


@pytest.mark.parametrize("name", MATRIX)
def test_policies_allow_exactly_the_calls_of_the_architecture(name: str) -> None:
    objects = render(name)
    policies = _list_policies(objects)
    if name == "every option off":
        assert not policies
        return
    peers = _list_peers(objects)
    kinds = {item["kind"]: item for item in objects}
    on_ray = {part for part, kind in (("rollout", "RayService"), ("trainer", "RayJob")) if kind in kinds}
    callers = peers | {key: OUTSIDE[key] for key in ("prometheus", "keda", "kuberay", "ingress", "search", "other")}
    calls = CALLS | MORE_CALLS.get(name, {})
    for caller, source in callers.items():
        for part, target in peers.items():
            expected = set(calls.get((caller, part), ()))
            if part in on_ray:
                if caller == part:
                    expected = set(PORTS)
                if caller == "prometheus":
                    expected |= {8080}
                if caller == "kuberay":
                    expected |= {8265, 52365}
            if part == "redis" and not _has_exporter(objects) and caller == "prometheus":
                expected = set()
            assert _list_ports(policies, source, target) == expected, (caller, part)


def _has_exporter(objects: tuple[Object, ...]) -> bool:
    [(_, pod)] = list_pods(find_object(objects, "StatefulSet", "redis"))
    return any(container["name"] == "exporter" for container in pod["spec"]["containers"])


@pytest.mark.parametrize("name", MATRIX)
def test_every_pod_is_isolated_and_a_stranger_reaches_none(name: str) -> None:
    objects = render(name)
    policies = _list_policies(objects)
    for part, peer in _list_peers(objects).items() if policies else ():
        assert not _list_ports(policies, OUTSIDE["other"], peer), part
        assert not _list_ports(policies, peer, OUTSIDE["other"]), part


def _open_from(values: Mapping[str, Any], part: str) -> dict[str, set[int]]:
    """Where a part may connect to outside of the release: TCP ports."""
    objects = render_values(values)
    policies, own = _list_policies(objects), _list_peers(objects)[part]
    ports = {key: _list_ports(policies, own, peer) for key, peer in OUTSIDE.items()}
    assert _list_ports(policies, own, OUTSIDE["dns"], "UDP") == ports["dns"]
    return {key: found for key, found in ports.items() if found}


DNS = {"dns": {53}, "local dns": {53}}
ROLE = {"internet": {443}, "metadata": {80, 443}, "pod identity": {80, 443}, "local dns": {53, 443}}
KEYS = {"internet": {443}, "metadata": {443}, "pod identity": {443}, "local dns": {53, 443}}
OPENSHIFT = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}
FETCH = [{"url": "s3://bucket/x", "path": "x", "for": ["retriever", "trainer"]}]


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [
        ({}, "retriever", DNS),
        ({}, "trainer", DNS),
        ({}, "redis", DNS),
        ({}, "reward", {}),  # code of one's own runs in it: it looks up no names either
        ({"fetch": FETCH}, "retriever", DNS | ROLE),
        ({"fetch": FETCH}, "rollout", DNS),
        ({"fetch": FETCH, "objectStore": {"existingSecret": "keys"}}, "retriever", DNS | KEYS),
        ({"settings": {"trainer": {"upload_url": "s3://bucket/runs"}}}, "trainer", DNS | ROLE),
        ({"settings": {"trainer": {"upload_url": "s3://bucket/runs"}}}, "rollout", DNS),
        ({"settings": {"trainer": {"publish": {"uri": "s3://bucket/policies"}}}}, "rollout", DNS | ROLE),
        ({"settings": {"redis": {"payloads_url": "s3://bucket/groups"}}}, "rollout", DNS | ROLE),
        ({"objectStore": {"existingSecret": "keys"}}, "trainer", DNS | KEYS),
        ({"objectStore": {"existingSecret": "keys"}}, "redis", DNS),
        ({"networkPolicy": {"dns": {"to": [OPENSHIFT], "ports": [53]}}}, "trainer", {"openshift dns": {53}}),
    ],
)  # fmt: skip
def test_only_names_object_stores_and_roles_are_reached_outside(
    values: Mapping[str, Any], part: str, expected: dict[str, set[int]]
) -> None:
    assert _open_from(values, part) == expected


def test_values_open_clients_collector_and_more() -> None:
    objects = render("every option on")
    policies, peers = _list_policies(objects), _list_peers(objects)
    for part in ("retriever", "reward", "rollout", "trainer"):
        assert is_allowed(policies, peers[part], OUTSIDE["collector"], 4317)
    assert not is_allowed(policies, peers["redis"], OUTSIDE["collector"], 4317)
    judge = Peer("judge", address="10.1.2.3")
    assert is_allowed(policies, peers["reward"], judge, 443)
    assert not is_allowed(policies, peers["redis"], judge, 443)


def test_a_trainer_that_sends_policies_listens_where_the_engines_may_connect() -> None:
    settings = yaml.safe_load(read_settings(render("every option on")))
    assert settings["trainer"]["publish"]["direct_address"] == ":18642"
    assert "direct_address" not in read_settings(render("defaults"))
