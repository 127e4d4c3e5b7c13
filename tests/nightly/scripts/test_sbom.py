"""Bills of materials: complete, valid by CycloneDX's own schema, and the same for the same locks."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import sbom
import tools
from locked_packages import NODE_LOCK, read_python_lock

NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dist")
    try:
        files = sbom.write_boms(folder, "0.1.0", NOW, [("reward", "cpu")])
    except tools.ToolError as error:
        pytest.skip(str(error))
    # The schema's check, which is part of writing, takes seconds for a service with many packages.
    files.append(folder / "forage-console.cdx.json")
    files[-1].write_text(sbom.render(sbom.make_bom("console", "cpu", "0.1.0", NOW)))
    return {file.name.removesuffix(".cdx.json"): json.loads(file.read_text()) for file in files}


def test_every_service_and_device_has_one() -> None:
    documents = sbom.list_documents()
    locks = [lock for home in tools.HOMES.values() for lock in home.glob("requirements*.lock")]
    assert len(documents) == len(set(documents)) == len(locks)
    assert {("cli", "cpu"), ("rollout", "cpu"), ("rollout", "gpu")} <= set(documents)


@pytest.mark.parametrize("service", ["reward", "console"])
def test_every_locked_package_is_a_component_with_its_hashes(
    documents: dict[str, dict[str, Any]], service: str
) -> None:
    document = documents[f"forage-{service}"]
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["name"] == f"forage-{service}"
    lock = (tools.HOMES[service] / "requirements.lock").read_text()
    components = [one for one in document["components"] if one["purl"].startswith("pkg:pypi/")]
    assert {(one["name"], one["version"]) for one in components} == {
        (package.name, package.version) for package in read_python_lock(lock)
    }
    hashes = [found for one in components for found in one["externalReferences"][0]["hashes"]]
    assert all(found["alg"] == "SHA-256" and found["content"] in lock for found in hashes)
    assert len(hashes) == lock.count("--hash=sha256:")
    assert sum("licenses" in one for one in components) >= 0.9 * len(components)


def test_the_consoles_has_what_its_pages_contain(documents: dict[str, dict[str, Any]]) -> None:
    packages = json.loads((sbom.REPOSITORY / NODE_LOCK).read_text())["packages"]
    shipped = {path for path, entry in packages.items() if path and not entry.get("dev")}
    components = [one for one in documents["forage-console"]["components"] if one["purl"].startswith("pkg:npm/")]
    assert len(components) == len(shipped)
    assert {("@mantine", "core"), ("", "react")} <= {(one.get("group", ""), one["name"]) for one in components}
    assert not [one for one in components if one["name"] in ("vite", "vitest", "eslint")]
    react = next(one for one in components if one["purl"].startswith("pkg:npm/react@"))
    assert [(found["alg"], len(found["content"])) for found in react["hashes"]] == [("SHA-512", 128)]


def test_the_same_locks_give_the_same_bytes(documents: dict[str, dict[str, Any]]) -> None:
    again = json.loads(sbom.render(sbom.make_bom("reward", "cpu", "0.1.0", NOW)))
    assert again == documents["forage-reward"]
    assert sbom.make_bom("reward", "cpu", "0.2.0", NOW).serial_number.urn != again["serialNumber"]


@pytest.mark.parametrize("field", ["bomFormat", "components"])
def test_the_schema_refuses_another_document(documents: dict[str, dict[str, Any]], field: str) -> None:
    small = documents["forage-reward"] | {
        "components": documents["forage-reward"]["components"][:2],
        "dependencies": [],
    }
    assert sbom.find_errors(json.dumps(small)) == []
    assert sbom.find_errors(json.dumps(small | {field: "something else"}))


def test_the_command_needs_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sbom.main([]) == 2
    assert capsys.readouterr().err == "usage: sbom.py FOLDER\n"
