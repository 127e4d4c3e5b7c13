"""Upgrades: what Kubernetes would refuse halfway is refused before anything is applied, and two trainers cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from deployment_tools import HELMS
from helm_chart import MATRIX, find_object, list_pods, parse_objects, render, render_values, run_template
from helm_cluster import Cluster, cluster

__all__ = ["cluster"]


def _install(cluster: Cluster, name: str = "defaults") -> None:
    """Add what lookups of the chart find after an install."""
    for item in render(name):
        component = item["metadata"]["labels"]["app.kubernetes.io/component"]
        if item["kind"] in ("ConfigMap", "StatefulSet", "PersistentVolumeClaim", "Job", "RayJob"):
            fields = {key: value for key, value in item.items() if key in ("spec", "data")}
            cluster.add(item["kind"], item["metadata"]["name"], component, **fields)


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"redis": {"storage": {"size": "30Gi"}}}, "delete statefulset forage-redis --cascade=orphan"),
        ({"redis": {"storage": {"storageClassName": "fast"}}}, "redis.storage.storageClassName is fast"),
        ({"storage": {"shared": {"accessModes": ["ReadWriteOnce"]}}}, "storage.shared.accessModes is [ReadWriteOnce]"),
        ({"storage": {"shared": {"storageClassName": "nfs"}}}, "storage.shared.storageClassName is nfs"),
        ({"storage": {"shared": {"size": "10Gi"}}}, "no claim can shrink"),
        ({"fullnameOverride": "other"}, "Restore fullnameOverride"),
    ],
)  # fmt: skip
def test_changes_that_kubernetes_refuses_are_refused_first(
    version: str, values: Mapping[str, Any], sentence: str, cluster: Cluster
) -> None:
    _install(cluster)
    ended = cluster.render(values, version)
    assert ended.returncode != 0
    assert sentence in ended.stderr


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"redis": {"storage": {"size": "20480Mi"}}},
        {"storage": {"shared": {"size": "200Gi"}}},
        {"settings": {"trainer": {"total_training_steps": 9}}},
        {"trainer": {"mode": "rayjob", "nodes": 2}},
        {"redis": {"enabled": False, "external": {"url": "redis://x:6379/0"}}},
    ],
)
def test_other_changes_are_accepted(values: Mapping[str, Any], cluster: Cluster) -> None:
    _install(cluster)
    ended = cluster.render(values)
    assert ended.returncode == 0, ended.stderr


def test_a_storage_class_of_an_installed_volume_stays_where_the_values_name_none(cluster: Cluster) -> None:
    claim = {"storageClassName": "standard", "accessModes": ["ReadWriteMany"]}
    claim |= {"resources": {"requests": {"storage": "20Gi"}}}
    cluster.add("StatefulSet", "forage-redis", "redis", spec={"volumeClaimTemplates": [{"spec": claim}]})
    cluster.add("PersistentVolumeClaim", "forage-shared", "shared", spec=claim)
    objects = parse_objects(cluster.render({}).stdout)
    [redis] = find_object(objects, "StatefulSet", "redis")["spec"]["volumeClaimTemplates"]
    assert redis["spec"]["storageClassName"] == "standard"
    assert find_object(objects, "PersistentVolumeClaim")["spec"]["storageClassName"] == "standard"


@pytest.mark.parametrize(("kind", "values"), [("Job", {}), ("RayJob", MATRIX["trainer on Ray"])])
def test_a_trainer_that_a_failed_upgrade_left_is_named(kind: str, values: Mapping[str, Any], cluster: Cluster) -> None:
    """The oldest one is the installed one, whatever its name; another release's are not this one's concern."""
    cluster.add(kind, "forage-trainer-ffffffff", "trainer", "2026-01-01T00:00:00Z")
    cluster.add(kind, "forage-trainer-00000000", "trainer", "2026-01-02T00:00:00Z")
    ended = cluster.render(values)
    assert ended.returncode != 0
    assert f"kubectl -n training delete {kind.lower()}/forage-trainer-00000000, and" in ended.stderr
    assert "helm -n training rollback forage" in ended.stderr


def test_a_trainer_that_helm_has_deleted_is_none_that_an_upgrade_left(cluster: Cluster) -> None:
    """KubeRay's finalizer keeps a RayJob until its cluster has ended, and the installed one is newer then."""
    deleted = {"deletionTimestamp": "2026-01-02T00:00:00Z"}
    cluster.add("RayJob", "forage-trainer-ffffffff", "trainer", "2026-01-01T00:00:00Z", metadata=deleted)
    cluster.add("RayJob", "forage-trainer-00000000", "trainer", "2026-01-02T00:00:00Z")
    ended = cluster.render(MATRIX["trainer on Ray"])
    assert ended.returncode == 0, ended.stderr


def test_who_may_not_list_ray_jobs_can_upgrade_a_job(cluster: Cluster) -> None:
    folder = "/apis/ray.io/v1/namespaces/training/rayjobs"
    cluster.pages[folder] = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403}
    assert cluster.render({}).returncode == 0
    assert cluster.render(MATRIX["trainer on Ray"]).returncode != 0


@pytest.mark.parametrize("version", HELMS)
def test_values_of_an_older_chart_are_told_from_a_defect(version: str) -> None:
    ended = run_template({"networkPolicy": {"dns": None}}, version)
    assert ended.returncode != 0
    assert "use --reset-then-reuse-values instead" in ended.stderr


def test_a_failed_upgrade_can_be_tried_again_with_the_same_values(cluster: Cluster) -> None:
    """Helm takes the trainer that the first try left, which has the same name, and deletes the old one."""
    cluster.add("Job", "forage-trainer-ffffffff", "trainer", "2026-01-01T00:00:00Z")
    name = find_object(render("defaults"), "Job")["metadata"]["name"]
    cluster.add("Job", name, "trainer", "2026-01-02T00:00:00Z")
    assert cluster.render({}).returncode == 0
    assert cluster.render({"trainer": {"backoffLimit": 3, "shmSize": "3Gi"}}).returncode != 0


def test_switching_autoscaling_on_keeps_the_replicas_that_run(cluster: Cluster) -> None:
    for part, replicas in (("retriever", 3), ("reward", 4), ("rollout", 0)):
        cluster.add("Deployment", f"forage-{part}", part, spec={"replicas": replicas})
    on = {"autoscaling": {"enabled": True}}
    values = {"retriever": on, "reward": on, "rollout": {"keda": {"enabled": True}}}
    objects = parse_objects(cluster.render(values).stdout)
    kept = {
        part: find_object(objects, "Deployment", part)["spec"]["replicas"]
        for part in ("retriever", "reward", "rollout")
    }
    assert kept == {"retriever": 3, "reward": 4, "rollout": 0}
    objects = parse_objects(cluster.render({"retriever": {"replicas": 2}}).stdout)
    assert find_object(objects, "Deployment", "retriever")["spec"]["replicas"] == 2


@pytest.mark.parametrize("mode", ["job", "rayjob"])
def test_the_scheduler_starts_no_trainer_beside_another_one(mode: str) -> None:
    mine = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}, "nodeAffinity": {}}
    values = {"mode": mode, "affinity": mine, "rayjob": {"head": {"affinity": mine}}}
    trainer = find_object(render_values({"trainer": values}), "RayJob" if mode == "rayjob" else "Job")
    leases = {}
    for where, pod in list_pods(trainer):
        affinity = pod["spec"].get("affinity", {})
        [term] = affinity.get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [{}])
        leases[where] = (pod["metadata"]["labels"].get("forage/lease"), term)
        if term:
            assert affinity.keys() == mine.keys(), "the values' own stay"
    lease = {"topologyKey": "kubernetes.io/os", "labelSelector": {"matchLabels": {"forage/lease": "forage-trainer"}}}
    [head, *others] = leases.values()
    if mode == "rayjob":  # the nodes of a cluster and what submits its job run beside its head
        [others[0], head] = [head, others[0]]
    assert head == ("forage-trainer", lease), leases
    assert all(label is None and not term for label, term in others), leases
