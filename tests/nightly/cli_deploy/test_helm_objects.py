"""Every object of the chart is valid for Kubernetes, and everything that it refers to exists."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from deployment_tools import find_packages
from helm_chart import MATRIX, NAMESPACE, Object, describe, find_object, list_pods, render, render_values, run_template

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
CUSTOM = yaml.safe_load((Path(__file__).parent / "crds.yaml").read_text())
EXISTING = {
    "registry", "bucket", "team-volume", "token", "console-token", "redis-users", "ray-token", "redis-password",
    "index", "wires", "signing-keys",
}  # fmt: skip
"""Objects that values of the matrix expect in the cluster."""


def format_kind(item: Object) -> str:
    return f"{item['apiVersion']}/{item['kind']}"


@functools.cache
def list_distinct_objects() -> list[Object]:
    """List every distinct object of the matrix."""
    distinct = {json.dumps(item, sort_keys=True): item for name in MATRIX for item in render(name)}
    return list(distinct.values())


@pytest.fixture(scope="module")
def validate() -> Callable[[Object, str], None]:
    """A strict validator: an unknown field is an error."""
    sys.path.append(str(find_packages()))
    import kubernetes_validate
    from kubernetes_validate import utils

    utils.schema_contents = functools.cache(utils.schema_contents)  # otherwise it reads megabytes for every object

    def check(item: Object, version: str) -> None:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            raise AssertionError(f"{describe(item)} on {version}: {error}") from None

    return check


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_for_kubernetes(version: str, validate: Callable[[Object, str], None]) -> None:
    checked = 0
    for item in list_distinct_objects():
        if format_kind(item) not in CUSTOM:
            validate(item, version)
            checked += 1
            continue
        for where, pod in list_pods(item):
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": where}, "template": pod}
            validate(template, version)
    assert checked > 100


def test_an_unknown_field_is_an_error(validate: Callable[[Object, str], None]) -> None:
    item = json.loads(json.dumps(find_object(render("defaults"), "Deployment", "retriever")))
    item["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(AssertionError, match="readynessProbe"):
        validate(item, VERSIONS[-1])


def _expand(short: Any) -> Object:
    """Expand the short form of crds.yaml to a JSON schema that refuses unknown fields."""
    if short == "strings":
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if short == "pod":
        return {"type": "object"}
    if isinstance(short, str):
        return {"type": short}
    if isinstance(short, list):
        return {"type": "array", "items": _expand(short[0])}
    if "enum" in short:
        return {"enum": short["enum"]}
    properties = {key: _expand(value) for key, value in short.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _load_definitions() -> dict[str, Object]:
    """Load the full schemas from `FORAGE_CRDS`, a folder or .tgz of definitions; unknown fields are refused."""
    source = Path(os.environ["FORAGE_CRDS"])
    texts = [file.read_text() for file in source.glob("*.yaml")] if source.is_dir() else list(_read_archive(source))
    schemas = {}
    for text in texts:
        spec = yaml.load(text, yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            _forbid_unknown_fields(schema)
            schemas[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema["properties"]["spec"]
    return schemas


def _read_archive(archive: Path) -> Iterator[str]:
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            stream = files.extractfile(member)
            if stream is not None and member.name.endswith(".yaml"):
                yield stream.read().decode()


def _forbid_unknown_fields(schema: Any) -> None:
    if isinstance(schema, list):
        for child in schema:
            _forbid_unknown_fields(child)
    elif isinstance(schema, dict):
        if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema.setdefault("additionalProperties", False)
        for child in schema.values():
            _forbid_unknown_fields(child)


def _import_jsonschema() -> ModuleType:
    sys.path.append(str(find_packages()))
    import jsonschema

    return jsonschema


def _check_custom(schemas: dict[str, Object]) -> set[str]:
    jsonschema = _import_jsonschema()
    validators = {name: jsonschema.Draft7Validator(schema) for name, schema in schemas.items()}
    kinds = set()
    for item in list_distinct_objects():
        if format_kind(item) in validators:
            errors = [
                f"{'.'.join(map(str, error.path))}: {error.message[:200]}"
                for error in validators[format_kind(item)].iter_errors(item["spec"])
            ]
            assert not errors, (describe(item), errors)
            kinds.add(item["kind"])
    return kinds


def test_custom_resources_have_known_fields() -> None:
    kinds = _check_custom({name: _expand(short) for name, short in CUSTOM.items()})
    assert kinds >= {"RayService", "RayJob", "ServiceMonitor", "PodMonitor", "ScaledObject", "Certificate"}


@pytest.mark.skipif("FORAGE_CRDS" not in os.environ, reason="FORAGE_CRDS is not set to definitions of custom resources")
def test_custom_resources_are_valid_by_their_full_definitions() -> None:
    definitions = _load_definitions()
    assert _check_custom(definitions) == {name.rpartition("/")[2] for name in CUSTOM if name in definitions}


@pytest.mark.parametrize("name", MATRIX)
def test_references_between_objects_resolve(name: str) -> None:
    """References to Secrets, ConfigMaps, claims, accounts, ports and volumes; selectors of pods."""
    objects = render(name)
    defined = {(item["kind"], item["metadata"]["name"]) for item in objects}
    assert len(defined) == len(objects)
    defined |= {("Secret", item["spec"]["secretName"]) for item in objects if item["kind"] == "Certificate"}
    labels = []
    for item in objects:
        assert item["metadata"]["namespace"] == NAMESPACE, describe(item)
        for where, pod in list_pods(item):
            labels.append(pod["metadata"].get("labels", {}))
            spec = pod["spec"]
            for kind, reference in _list_references(spec):
                assert (kind, reference) in defined or reference in EXISTING, (describe(item), where, kind, reference)
            volumes = {volume["name"] for volume in spec["volumes"]} if "volumes" in spec else set()
            volumes |= {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])}
            used = set()
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                mounted = [mount["name"] for mount in container.get("volumeMounts", [])]
                assert len(set(mounted)) == len(mounted)
                used |= set(mounted)
                assert len({entry["name"] for entry in container.get("env", [])}) == len(container.get("env", []))
                ports = {port["name"] for port in container.get("ports", [])}
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    port = container.get(probe, {}).get("httpGet", {}).get("port", 0)
                    assert isinstance(port, int) or port in ports, (describe(item), container["name"], probe)
            assert used == volumes, (describe(item), where, used ^ volumes)
    for item in objects:
        if item["kind"] in ("Service", "PodDisruptionBudget"):
            selector = item["spec"]["selector"]
            required = {
                key: value
                for key, value in selector.get("matchLabels", selector).items()
                if not key.startswith("ray.io/")  # labels that the operator adds
            }
            assert any(required.items() <= pod_labels.items() for pod_labels in labels), describe(item)
        if item["kind"] == "HorizontalPodAutoscaler" or item["kind"] == "ScaledObject":
            target = item["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in defined
            assert "replicas" not in find_object(objects, target["kind"], target["name"])["spec"], (
                "the autoscaler sets it"
            )


def _list_references(spec: Object) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", spec["serviceAccountName"]
    for secret in spec.get("imagePullSecrets", []):
        yield "Secret", secret["name"]
    for volume in spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for source in container.get("envFrom", []):
            for key, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                if key in source:
                    yield kind, source[key]["name"]
        for entry in container.get("env", []):
            if "secretKeyRef" in entry.get("valueFrom", {}):
                yield "Secret", entry["valueFrom"]["secretKeyRef"]["name"]


@pytest.mark.parametrize("name", MATRIX)
def test_addresses_in_the_settings_are_those_of_the_services(name: str) -> None:
    objects = render(name)
    settings = yaml.safe_load(find_object(objects, "ConfigMap", "forage-settings")["data"]["settings.yaml"])
    services = {item["metadata"]["name"]: item for item in objects if item["kind"] == "Service"}
    listening = {}
    for item in objects:
        for _, pod in list_pods(item):
            for container in pod["spec"]["containers"]:
                for entry in container.get("env", []):
                    if entry["name"].endswith("_ADDRESS"):
                        listening[entry["name"]] = entry["value"]
    for section in ("retriever", "reward", "rollout", "trainer"):
        for key, address in settings.get(section, {}).items():
            host, _, port = str(address).rpartition(":")
            if not key.endswith("_address") or host.endswith(".example") or host not in services:
                continue
            assert int(port) in {entry["port"] for entry in services[host]["spec"]["ports"]}
            assert listening[f"FORAGE__{section}__{key}".upper()] == f"0.0.0.0:{port}"


def test_services_listen_on_ipv6_where_the_values_say_so() -> None:
    listening = [
        (entry["name"], entry["value"])
        for item in render_values({"listenHost": "::"})
        for _, pod in list_pods(item)
        for container in pod["spec"]["containers"]
        for entry in container.get("env", [])
        if entry["name"].endswith("_ADDRESS")
    ]
    assert len(listening) >= 8
    assert all(re.fullmatch(r"\[::\]:\d+", value) for _, value in listening), listening
    assert "listenHost" in run_template({"listenHost": "everywhere"}).stderr
