"""What NetworkPolicies allow, as Kubernetes defines it: additive rules, both ends must agree."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """An end of a connection: a pod of a namespace, or an address outside the cluster."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


def is_allowed(policies: Iterable[Object], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection passes the policies at both of its ends."""
    policies = list(policies)
    return _passes(policies, source, target, port, protocol, "Egress") and _passes(
        policies, target, source, port, protocol, "Ingress"
    )


def _passes(policies: list[Object], own: Peer, other: Peer, port: int, protocol: str, side: str) -> bool:
    selecting = [
        policy["spec"]
        for policy in policies
        if own.namespace == policy["metadata"]["namespace"]
        and side in policy["spec"]["policyTypes"]
        and _matches(policy["spec"]["podSelector"], own.labels)
    ]
    if not selecting:
        return True  # nothing isolates this pod
    rules = [rule for spec in selecting for rule in spec.get(side.lower()) or []]
    where = "to" if side == "Egress" else "from"
    return any(_has_port(rule, port, protocol) and _has_peer(rule.get(where), own, other) for rule in rules)


def _has_port(rule: Object, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return not ports or any(
        one.get("protocol", "TCP") == protocol and one["port"] <= port <= one.get("endPort", one["port"])
        for one in ports
    )


def _has_peer(peers: list[Object] | None, own: Peer, other: Peer) -> bool:
    return not peers or any(_is_peer(peer, own, other) for peer in peers)


def _is_peer(peer: Object, own: Peer, other: Peer) -> bool:
    if "ipBlock" in peer:
        return bool(other.address) and ipaddress.ip_address(other.address) in ipaddress.ip_network(
            peer["ipBlock"]["cidr"]
        )
    if other.address:
        return False
    if "namespaceSelector" in peer:
        labels = {"kubernetes.io/metadata.name": other.namespace, **other.namespace_labels}
        if not _matches(peer["namespaceSelector"], labels):
            return False
    elif own.namespace != other.namespace:
        return False
    return _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, selector
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()
