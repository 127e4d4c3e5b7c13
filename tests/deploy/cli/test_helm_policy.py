"""Pods keep to the `restricted` profile, with limits and probes; the network lets through the architecture's arrows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deployment_tools import checkov
from helm_chart import MATRIX, Object, containers, one, pods, rendered, title

ARROWS = {
    ("rollout", "retriever"): {18610, 18611},
    ("rollout", "reward"): {18620},
    ("rollout", "redis"): {6379},
    ("trainer", "redis"): {6379},
    ("test", "rollout"): {18630, 18631, 18632},
}
"""docs/explanation/architecture.md: who calls whom."""
PROBES = {("trainer", "rollout"): {18630, 18632}, ("trainer", "reward"): {18620}}
"""Besides, where training probes its policy."""
METRICS = {"retriever": 18610, "reward": 18621, "rollout": 18631, "trainer": 18641}


def _pods(name: str) -> Iterator[tuple[Object, str, Object]]:
    for thing in rendered(name):
        for where, pod in pods(thing):
            yield thing, f"{title(thing)}{where}", pod


@pytest.mark.parametrize("name", MATRIX)
def test_pods_keep_to_the_restricted_profile(name: str) -> None:
    for _, where, pod in _pods(name):
        spec = pod["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, where
        assert context["runAsUser"] > 0, where
        assert context["seccompProfile"]["type"] == "RuntimeDefault", where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), where
        for volume in spec.get("volumes", []):
            assert set(volume) <= {"name", "configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}, (
                where
            )
        for container, _ in containers(spec):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, (where, container["name"])
            assert own["readOnlyRootFilesystem"] is True, (where, container["name"])
            assert own["capabilities"] == {"drop": ["ALL"]}, (where, container["name"])
            assert own["runAsNonRoot"] is True, (where, container["name"])
            assert own["privileged"] is False, (where, container["name"])
            assert not any("hostPort" in port for port in container.get("ports", [])), where


@pytest.mark.parametrize("name", MATRIX)
def test_containers_have_limits_probes_and_a_pinned_image(name: str) -> None:
    for thing, where, pod in _pods(name):
        for container, first in containers(pod["spec"]):
            for amounts in ("requests", "limits"):
                assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"][amounts]), (where, amounts)
            image = container["image"].rpartition("/")[2]
            assert ":" in image, (where, image)
            assert not image.endswith(":latest"), (where, image)
            ends_by_itself = first or thing["kind"] == "Pod" or container["name"] == "submitter"
            if not ends_by_itself:
                assert {"livenessProbe", "readinessProbe"} <= set(container), (where, container["name"])
            if container["name"] in (
                "redis",
                "retriever",
                "reward",
                "rollout",
                "ray-head",
                "ray-worker",
                "front",
                "trainer",
            ):
                assert "startupProbe" in container, (where, container["name"])


@pytest.mark.parametrize("name", MATRIX)
def test_only_an_autoscaling_ray_head_may_talk_to_the_api_server(name: str) -> None:
    objects = rendered(name)
    scales = [
        thing
        for thing in objects
        if thing["kind"] == "RayService" and thing["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    ]
    allowed = [where for _, where, pod in _pods(name) if pod["spec"]["automountServiceAccountToken"]]
    assert allowed == [f"{title(thing)}.spec.rayClusterConfig.headGroupSpec.template" for thing in scales]
    assert len([thing for thing in objects if thing["kind"] == "Role"]) == len(scales)
    for thing in objects:
        if thing["kind"] == "ServiceAccount":
            assert thing["automountServiceAccountToken"] is False
        if thing["kind"] == "Role":
            verbs = {verb for rule in thing["rules"] for verb in rule["verbs"]}
            assert not verbs & {"*", "create", "delete", "escalate"}
            assert "secrets" not in {resource for rule in thing["rules"] for resource in rule["resources"]}


@pytest.mark.parametrize("name", MATRIX)
def test_no_secret_is_in_a_config_map_and_none_is_short(name: str) -> None:
    objects = rendered(name)
    for thing in objects:
        if thing["kind"] == "Secret":
            [value] = thing["data"].values()
            assert len(value) >= 48
            assert thing["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
            text = json.dumps([other for other in objects if other["kind"] != "Secret"])
            assert value not in text


def _component(selector: Object) -> str:
    component: str = selector["matchLabels"]["app.kubernetes.io/component"]
    return component


def _peers(rule: Object, side: str) -> list[str]:
    return [_component(peer["podSelector"]) for peer in rule[side] if set(peer) == {"podSelector"}]


@pytest.mark.parametrize("name", MATRIX)
def test_the_network_lets_through_the_arrows_of_the_architecture_and_no_more(name: str) -> None:
    objects = rendered(name)
    policies = [thing for thing in objects if thing["kind"] == "NetworkPolicy"]
    if name == "every option off":
        assert not policies
        return
    deny = one(objects, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/instance": "forage"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    ingress: dict[tuple[str, str], set[int]] = {}
    egress: dict[tuple[str, str], set[int]] = {}
    for policy in policies:
        spec = policy["spec"]
        if spec == deny:
            continue
        me = _component(spec["podSelector"])
        for rule in spec["ingress"] or []:
            for peer in _peers(rule, "from"):
                if peer != me:
                    ingress[peer, me] = {port["port"] for port in rule["ports"]}
        for rule in spec["egress"]:
            for peer in _peers(rule, "to"):
                if peer != me:
                    egress[me, peer] = {port["port"] for port in rule["ports"]}
    assert ingress == egress
    there = {_component(policy["spec"]["podSelector"]) for policy in policies if policy["spec"] != deny}
    arrows = ARROWS | (PROBES if name == "probes in training" else {})
    assert ingress == {arrow: ports for arrow, ports in arrows.items() if set(arrow) <= there}
    running = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for _, _, pod in _pods(name)}
    assert there == running | {"test"}
    assert all(pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "forage" for _, _, pod in _pods(name))


def test_outside_is_the_scraper_the_clients_that_are_named_the_object_store_and_the_collector() -> None:
    def outside(name: str, component: str, side: str) -> list[tuple[str, list[int]]]:
        policy = one(rendered(name), "NetworkPolicy", f"forage-{component}")["spec"]
        key = {"ingress": "from", "egress": "to"}[side]
        found = []
        for rule in policy[side] or []:
            for peer in rule[key]:
                if set(peer) != {"podSelector"}:
                    found.append((json.dumps(peer, sort_keys=True), [port["port"] for port in rule.get("ports", [])]))
        return found

    for component, port in METRICS.items():
        [(peer, ports)] = outside("defaults", component, "ingress")
        assert "monitoring" in peer
        assert ports == [port]
        [(dns, ports)] = outside("defaults", component, "egress")
        assert "kube-dns" in dns
        assert ports == [53, 53]
    assert ('{"namespaceSelector": {"matchLabels": {"team": "search"}}}', [18630, 18632]) in outside(
        "every option on", "rollout", "ingress"
    )
    world = ('{"ipBlock": {"cidr": "0.0.0.0/0"}}', [443])
    assert world in outside("every option on", "retriever", "egress")
    assert world in outside("every option on", "trainer", "egress")
    assert world not in outside("every option on", "redis", "egress")
    assert ('{"ipBlock": {"cidr": "10.0.0.0/8"}}', [443]) in outside("every option on", "reward", "egress")
    collector = (
        '{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}',
        [4317, 4318],
    )
    for component in METRICS:
        assert collector in outside("every option on", component, "egress")
    assert collector not in outside("every option on", "redis", "egress")


def test_rollout_has_longer_to_end_than_it_drains() -> None:
    [(_, _, pod)] = [found for found in _pods("every option on") if found[1].startswith("Deployment/forage-rollout")]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 61  # 40.5, and 20 more


# Left to who installs: pulling always, digests. And Redis takes a URL with its password, from the environment.
_CHECKOV_ACCEPTED = ("CKV_K8S_15", "CKV_K8S_43", "CKV_K8S_35")


def test_checkov_finds_nothing(tmp_path: Path) -> None:
    command = str(checkov())
    objects = [thing for name in ("every option on", "gpu-large") for thing in rendered(name)]
    # It does not know custom resources: their pods are shown to it as those of a Deployment, which never end.
    for thing in [thing for thing in objects if thing["kind"].startswith("Ray")]:
        for number, (where, pod) in enumerate(pods(thing)):
            if "submitter" not in where:
                spec = {"replicas": 1, "selector": {"matchLabels": pod["metadata"]["labels"]}, "template": pod}
                metadata = thing["metadata"] | {"name": f"{thing['metadata']['name']}-{number}"}
                objects.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    file = tmp_path / "chart.yaml"
    file.write_text(yaml.dump_all([thing for thing in objects if thing["kind"] != "Pod"], Dumper=yaml.CSafeDumper))
    options = ["--framework", "kubernetes", "--compact", "--quiet", "--skip-download", "-o", "json"]
    options += ["--skip-check", ",".join(_CHECKOV_ACCEPTED), "-f", str(file)]
    done = subprocess.run([command, *options], capture_output=True, text=True, cwd=tmp_path)
    report = json.loads(done.stdout)
    failed = [(check["check_id"], check["resource"]) for check in report["results"]["failed_checks"]]
    assert report["summary"]["passed"] > 500
    # An account's token, where it is needed: by Ray's autoscaler.
    assert failed == [("CKV_K8S_38", "Deployment.training.forage-rollout-0")]
