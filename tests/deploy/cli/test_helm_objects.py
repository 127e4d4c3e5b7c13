"""Every object that the chart makes is one that Kubernetes knows, and what it names is there."""

from __future__ import annotations

import functools
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from deployment_tools import packages
from helm_chart import MATRIX, NAMESPACE, Object, one, pods, rendered, title

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
CUSTOM = yaml.safe_load((Path(__file__).parent / "crds.yaml").read_text())
EXISTING = {
    "registry", "bucket", "team-volume", "token", "redis-url", "ray-token", "redis-password", "index",
}  # fmt: skip
"""What values of the matrix say is there already."""


def _named(thing: Object) -> str:
    return f"{thing['apiVersion']}/{thing['kind']}"


def _everything() -> list[Object]:
    """Each object of the matrix once."""
    seen = {json.dumps(thing, sort_keys=True): thing for name in MATRIX for thing in rendered(name)}
    return list(seen.values())


@pytest.fixture(scope="module")
def validate() -> Callable[[Object, str], None]:
    """Strict: an unknown field is an error, too."""
    sys.path.append(str(packages()))
    import kubernetes_validate
    from kubernetes_validate import utils

    utils.schema_contents = functools.cache(utils.schema_contents)  # megabytes, read anew for each object

    def check(thing: Object, version: str) -> None:
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            raise AssertionError(f"{title(thing)} on {version}: {error}") from None

    return check


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str, validate: Callable[[Object, str], None]) -> None:
    checked = 0
    for thing in _everything():
        if _named(thing) not in CUSTOM:
            validate(thing, version)
            checked += 1
            continue
        for where, pod in pods(thing):
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": where}, "template": pod}
            validate(template, version)
    assert checked > 100


def test_an_unknown_field_would_be_found(validate: Callable[[Object, str], None]) -> None:
    thing = json.loads(json.dumps(one(rendered("defaults"), "Deployment", "retriever")))
    thing["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(AssertionError, match="readynessProbe"):
        validate(thing, VERSIONS[-1])


def _closed(short: Any) -> Object:
    """A JSON schema of the short form in crds.yaml."""
    if short == "strings":
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if short == "pod":
        return {"type": "object"}
    if isinstance(short, str):
        return {"type": short}
    if isinstance(short, list):
        return {"type": "array", "items": _closed(short[0])}
    if "enum" in short:
        return {"enum": short["enum"]}
    properties = {key: _closed(value) for key, value in short.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _definitions() -> dict[str, Object]:
    """The full schemas, closed, from `FORAGE_CRDS`: a folder or .tgz of CustomResourceDefinitions."""
    place = Path(os.environ["FORAGE_CRDS"])
    texts = [file.read_text() for file in place.glob("*.yaml")] if place.is_dir() else list(_texts(place))
    found = {}
    for text in texts:
        spec = yaml.load(text, yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            _close(schema)
            found[f"{spec['group']}/{version['name']}/{spec['names']['kind']}"] = schema["properties"]["spec"]
    return found


def _texts(archive: Path) -> Iterator[str]:
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            stream = files.extractfile(member)
            if stream is not None and member.name.endswith(".yaml"):
                yield stream.read().decode()


def _close(schema: Any) -> None:
    if isinstance(schema, list):
        for child in schema:
            _close(child)
    elif isinstance(schema, dict):
        if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema.setdefault("additionalProperties", False)
        for child in schema.values():
            _close(child)


def _jsonschema() -> ModuleType:
    sys.path.append(str(packages()))
    import jsonschema

    return jsonschema


def _check_custom(schemas: dict[str, Object]) -> set[str]:
    jsonschema = _jsonschema()
    validators = {name: jsonschema.Draft7Validator(schema) for name, schema in schemas.items()}
    kinds = set()
    for thing in _everything():
        if _named(thing) in CUSTOM:
            errors = [
                f"{'.'.join(map(str, error.path))}: {error.message[:200]}"
                for error in validators[_named(thing)].iter_errors(thing["spec"])
            ]
            assert not errors, (title(thing), errors)
            kinds.add(thing["kind"])
    return kinds


def test_custom_resources_use_known_fields() -> None:
    kinds = _check_custom({name: _closed(short) for name, short in CUSTOM.items()})
    assert kinds >= {"RayService", "RayJob", "ServiceMonitor", "PodMonitor", "ScaledObject"}


@pytest.mark.skipif("FORAGE_CRDS" not in os.environ, reason="FORAGE_CRDS names no definitions of custom resources")
def test_custom_resources_are_valid() -> None:
    _check_custom(_definitions())


@pytest.mark.parametrize("name", MATRIX)
def test_what_is_named_exists(name: str) -> None:
    """Secrets, ConfigMaps, claims, accounts; ports of probes and Services; mounts of volumes; pods of selectors."""
    objects = rendered(name)
    made = {(thing["kind"], thing["metadata"]["name"]) for thing in objects}
    assert len(made) == len(objects)
    labels = []
    for thing in objects:
        assert thing["metadata"]["namespace"] == NAMESPACE, title(thing)
        for where, pod in pods(thing):
            labels.append(pod["metadata"].get("labels", {}))
            spec = pod["spec"]
            for kind, named in _references(spec):
                assert (kind, named) in made or named in EXISTING, (title(thing), where, kind, named)
            volumes = {volume["name"] for volume in spec["volumes"]} if "volumes" in spec else set()
            volumes |= {claim["metadata"]["name"] for claim in thing["spec"].get("volumeClaimTemplates", [])}
            used = set()
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                mounted = [mount["name"] for mount in container.get("volumeMounts", [])]
                assert len(set(mounted)) == len(mounted)
                used |= set(mounted)
                assert len({entry["name"] for entry in container.get("env", [])}) == len(container.get("env", []))
                ports = {port["name"] for port in container.get("ports", [])}
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    port = container.get(probe, {}).get("httpGet", {}).get("port", 0)
                    assert isinstance(port, int) or port in ports, (title(thing), container["name"], probe)
            assert used == volumes, (title(thing), where, used ^ volumes)
    for thing in objects:
        if thing["kind"] in ("Service", "PodDisruptionBudget"):
            selector = thing["spec"]["selector"]
            wanted = {
                key: value
                for key, value in selector.get("matchLabels", selector).items()
                if not key.startswith("ray.io/")  # which the operator puts there
            }
            assert any(wanted.items() <= found.items() for found in labels), title(thing)
        if thing["kind"] == "HorizontalPodAutoscaler" or thing["kind"] == "ScaledObject":
            target = thing["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in made
            assert "replicas" not in one(objects, target["kind"], target["name"])["spec"], "two would set it"


def _references(spec: Object) -> Iterator[tuple[str, str]]:
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
def test_addresses_in_the_settings_are_those_of_services(name: str) -> None:
    objects = rendered(name)
    settings = yaml.safe_load(one(objects, "ConfigMap", "forage-settings")["data"]["settings.yaml"])
    services = {thing["metadata"]["name"]: thing for thing in objects if thing["kind"] == "Service"}
    listening = {}
    for thing in objects:
        for _, pod in pods(thing):
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
