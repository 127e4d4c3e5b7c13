"""Pods meet the `restricted` profile, and have limits, probes and their own secrets alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deployment_tools import find_checkov
from helm_chart import MATRIX, Object, describe, list_containers, list_pods, render, render_values


def _list_all_pods(name: str) -> Iterator[tuple[Object, str, Object]]:
    for item in render(name):
        for where, pod in list_pods(item):
            yield item, f"{describe(item)}{where}", pod


@pytest.mark.parametrize("name", MATRIX)
def test_pods_meet_the_restricted_profile(name: str) -> None:
    for _, where, pod in _list_all_pods(name):
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
        for container, _ in list_containers(spec):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, (where, container["name"])
            assert own["readOnlyRootFilesystem"] is True, (where, container["name"])
            assert own["capabilities"] == {"drop": ["ALL"]}, (where, container["name"])
            assert own["runAsNonRoot"] is True, (where, container["name"])
            assert own["privileged"] is False, (where, container["name"])
            assert not any("hostPort" in port for port in container.get("ports", [])), where


@pytest.mark.parametrize("name", MATRIX)
def test_containers_have_limits_probes_and_pinned_images(name: str) -> None:
    for item, where, pod in _list_all_pods(name):
        for container, is_init in list_containers(pod["spec"]):
            for amounts in ("requests", "limits"):
                assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"][amounts]), (where, amounts)
            image = container["image"].rpartition("/")[2]
            assert ":" in image, (where, image)
            assert not image.endswith(":latest"), (where, image)
            terminates = is_init or item["kind"] == "Pod" or container["name"] == "submitter"
            if not terminates:
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
def test_only_an_autoscaling_ray_head_may_call_the_api_server(name: str) -> None:
    objects = render(name)
    autoscaling = [
        item
        for item in objects
        if item["kind"] == "RayService" and item["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    ]
    allowed = [where for _, where, pod in _list_all_pods(name) if pod["spec"]["automountServiceAccountToken"]]
    assert allowed == [f"{describe(item)}.spec.rayClusterConfig.headGroupSpec.template" for item in autoscaling]
    assert len([item for item in objects if item["kind"] == "Role"]) == len(autoscaling)
    for item in objects:
        if item["kind"] == "ServiceAccount":
            assert item["automountServiceAccountToken"] is False
        if item["kind"] == "Role":
            verbs = {verb for rule in item["rules"] for verb in rule["verbs"]}
            assert not verbs & {"*", "create", "delete", "escalate"}
            assert "secrets" not in {resource for rule in item["rules"] for resource in rule["resources"]}


@pytest.mark.parametrize("name", MATRIX)
def test_secrets_are_long_and_in_no_other_object(name: str) -> None:
    objects = render(name)
    for item in objects:
        if item["kind"] == "Secret":
            assert all(len(value) >= 48 for value in item["data"].values())
            assert item["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
            text = json.dumps([other for other in objects if other["kind"] != "Secret"])
            assert not [value for value in item["data"].values() if value in text]


@pytest.mark.parametrize("name", ["Redis URL from a Secret, rollout on Ray", "trainer on Ray"])
def test_the_trainer_alone_has_the_private_signing_key(name: str) -> None:
    keys: dict[str, set[str]] = {}
    for _, where, pod in _list_all_pods(name):
        for volume in pod["spec"].get("volumes", ()):
            if volume.get("secret", {}).get("secretName") == "signing-keys":
                component = "trainer" if "trainer" in where else "rollout"
                keys.setdefault(component, set()).update(item["path"] for item in volume["secret"]["items"])
                mounts = [mount for one in pod["spec"]["containers"] for mount in one.get("volumeMounts", ())]
                assert any(mount["mountPath"] == "/etc/forage/signing" for mount in mounts)
    assert keys == {"rollout": {"verify-key.pem"}, "trainer": {"signing-key.pem", "verify-key.pem"}}


@pytest.mark.parametrize("name", MATRIX)
def test_each_part_has_the_password_of_its_own_user_of_redis_and_no_other(name: str) -> None:
    for item in render(name):
        for _, pod in list_pods(item):
            part = pod["metadata"].get("labels", {}).get("app.kubernetes.io/component")
            for volume in pod["spec"].get("volumes", []):
                if volume["name"] == "redis-password":
                    assert volume["secret"]["items"] == [{"key": f"forage-{part}", "path": "password"}]
            for container, _ in list_containers(pod["spec"]):
                environment = {entry["name"]: entry for entry in container.get("env", [])}
                secret = [entry for key, entry in environment.items() if "REDIS" in key and "valueFrom" in entry]
                assert bool(secret) == (container["name"] == "exporter"), "files that the kubelet updates"
                assert "FORAGE__REDIS__URL" not in environment
                mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
                if "FORAGE__REDIS__USERNAME" in environment:
                    assert environment["FORAGE__REDIS__USERNAME"]["value"] == f"forage-{part}"
                    assert environment["FORAGE__REDIS__PASSWORD_FILE"]["value"] == "/etc/forage/redis/password"
                    assert "/etc/forage/redis" in mounted


@pytest.mark.parametrize("name", MATRIX)
def test_the_pod_of_user_rewards_has_no_token_of_the_cluster_and_no_data(name: str) -> None:
    for item, where, pod in _list_all_pods(name):
        if item["kind"] == "Deployment" and pod["metadata"]["labels"]["app.kubernetes.io/component"] == "reward":
            assert pod["spec"]["automountServiceAccountToken"] is False, where
            assert not any("persistentVolumeClaim" in volume for volume in pod["spec"]["volumes"]), where
            for container, _ in list_containers(pod["spec"]):
                sources = json.dumps([container.get("env", []), container.get("envFrom", [])])
                assert "secretKeyRef" not in sources, where
                assert "secretRef" not in sources, where


RDMA = {
    "gpu": {"count": 2, "resource": ""},
    "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}],
    "hostNetwork": True,
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
}


@pytest.mark.parametrize("values", [
    {"trainer": RDMA, "rollout": RDMA},
    {"trainer": RDMA | {"mode": "rayjob", "nodes": 2}, "rollout": RDMA | {"mode": "rayservice"}},
])  # fmt: skip
def test_claims_of_devices_and_what_rdma_needs_reach_the_containers_of_the_parts(values: Object) -> None:
    found = set()
    for item in render_values(values):
        for where, pod in list_pods(item):
            part = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            assert pod["spec"].get("hostNetwork", False) is (part in values), where
            for container, _ in list_containers(pod["spec"]):
                claims = container["resources"].get("claims", [])
                works = container["name"] in ("trainer", "rollout", "ray-worker")
                assert claims == ([{"name": "gpus"}] if works else []), container["name"]
                assert bool(pod["spec"].get("resourceClaims")) >= works
                assert "nvidia.com/gpu" not in container["resources"]["limits"]
                if works:
                    assert container["image"].endswith("-gpu")
                    capabilities = container["securityContext"]["capabilities"]
                    assert capabilities == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
                    assert container["securityContext"]["readOnlyRootFilesystem"] is True
                    found.add(part)
                if part not in values:
                    assert "add" not in container["securityContext"]["capabilities"], container["name"]
    assert found == values.keys()


def test_queues_schedulers_volumes_and_sidecars_of_the_values_reach_every_part() -> None:
    for name in ("every option on", "Redis URL from a Secret, rollout on Ray", "trainer on Ray"):
        for item in render(name):
            given = [pod for _, pod in list_pods(item) if pod["spec"].get("schedulerName") == "kai-scheduler"]
            assert bool(given) == ("kueue.x-k8s.io/queue-name" in item["metadata"]["labels"]), describe(item)
            for pod in given:
                assert pod["metadata"]["labels"]["example.com/cost-center"] == "7"
                assert pod["metadata"]["labels"]["app.kubernetes.io/component"] in describe(item)
                if "submitter" not in {container["name"] for container in pod["spec"]["containers"]}:
                    [sidecar] = [one for one in pod["spec"]["initContainers"] if one["name"] == "sidecar"]
                    assert sidecar["restartPolicy"] == "Always", "or it would keep a Job from ending"
                    mounts = [mount for one in pod["spec"]["containers"] for mount in one.get("volumeMounts", [])]
                    assert {"name": "scratch", "mountPath": "/scratch"} in mounts


def test_the_grace_period_of_the_rollout_is_longer_than_its_drain() -> None:
    [(_, _, pod)] = [
        entry for entry in _list_all_pods("every option on") if entry[1].startswith("Deployment/forage-rollout")
    ]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 61  # a drain of 40.5 s and 20 s more


# Always pulling images and digests are left to the user; the exporter takes its password from its environment alone.
_CHECKOV_ACCEPTED = ("CKV_K8S_15", "CKV_K8S_43", "CKV_K8S_35")


def test_checkov_finds_nothing(tmp_path: Path) -> None:
    command = str(find_checkov())
    objects = [item for name in ("every option on", "gpu-large") for item in render(name)]
    # Checkov does not know custom resources: it gets their pods, except those that end, as Deployments.
    for item in [item for item in objects if item["kind"].startswith("Ray")]:
        for number, (where, pod) in enumerate(list_pods(item)):
            if "submitter" not in where:
                spec = {"replicas": 1, "selector": {"matchLabels": pod["metadata"]["labels"]}, "template": pod}
                metadata = item["metadata"] | {"name": f"{item['metadata']['name']}-{number}"}
                objects.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    file = tmp_path / "chart.yaml"
    file.write_text(yaml.dump_all([item for item in objects if item["kind"] != "Pod"], Dumper=yaml.CSafeDumper))
    options = ["--framework", "kubernetes", "--compact", "--quiet", "--skip-download", "-o", "json"]
    options += ["--skip-check", ",".join(_CHECKOV_ACCEPTED), "-f", str(file)]
    ended = subprocess.run([command, *options], capture_output=True, text=True, cwd=tmp_path)
    report = json.loads(ended.stdout)
    failed = [(check["check_id"], check["resource"]) for check in report["results"]["failed_checks"]]
    assert report["summary"]["passed"] > 500
    # Ray's autoscaler needs the token of its service account.
    assert failed == [("CKV_K8S_38", "Deployment.training.forage-rollout-0")]
