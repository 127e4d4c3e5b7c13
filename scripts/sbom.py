"""Writes the bill of materials of every service in the CycloneDX format, from the locks.

    sbom.py dist      dist/forage-<service>.cdx.json, and …-gpu.cdx.json where a service has a lock for GPUs

A component has name, version, package URL, the hashes of its files, and its licence where the service's environment
(.venvs) has the package installed. The console's has the packages of its pages, too. The same locks and commit give
the same bytes but for licences.
"""

from __future__ import annotations

import base64
import datetime
import importlib.metadata
import json
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tools
from locked_packages import NODE_LOCK, normalize

if TYPE_CHECKING:
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License

REPOSITORY = tools.REPOSITORY
_ENTRY = re.compile(r"(?m)^([\w.-]+)==([^\s;\\]+)((?:.*\\\n)*(?: .*)?)")
_LICENSE = "License :: OSI Approved :: "


def import_library() -> None:
    """Make the CycloneDX library importable, behind what is installed here.

    Raises:
        tools.ToolError: it cannot be installed.
    """
    folder = tools.install_packages("cyclonedx-11.12.0", "-r", str(REPOSITORY / "scripts/requirements-sbom.lock"))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def find_licenses(service: str) -> dict[str, str]:
    """Licences that the packages of a service's environment declare, by normalized name."""
    folders = [str(folder) for folder in (REPOSITORY / ".venvs" / service / "lib").glob("python*/site-packages")]
    licenses = {}
    for distribution in importlib.metadata.distributions(path=folders):
        fields = distribution.metadata
        declared = [
            text.removeprefix(_LICENSE) for text in fields.get_all("Classifier") or () if text.startswith(_LICENSE)
        ]
        text = fields.get("License-Expression") or fields.get("License", "")
        if "\n" in text or len(text) > 80 or not text.strip():  # some have the whole text there
            text = " AND ".join(sorted(declared)) if len(declared) == 1 else "; ".join(sorted(declared))
        if text.strip():
            licenses[normalize(fields["Name"])] = text.strip()
    return licenses


def read_python_components(lock: str, licenses: dict[str, str]) -> Iterator[Component]:
    """Every package of a lock, with the hashes of all its files."""
    from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    for found, version, rest in _ENTRY.findall(lock):
        name = normalize(found)
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=one) for one in re.findall(r"sha256:(\w{64})", rest)]
        purl = PackageURL("pypi", name=name, version=version)
        # Not a page of one index: files come from whichever is configured.
        files = ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(purl.to_string()), hashes=hashes)
        yield Component(
            name=name,
            version=version,
            bom_ref=purl.to_string(),
            purl=purl,
            licenses=_make_licenses(licenses.get(name)),
            external_references=[files],
        )


def read_node_components(lock: str) -> Iterator[Component]:
    """Every package that the console's pages contain; those that only build and test them are left out."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    for path, entry in json.loads(lock)["packages"].items():
        if not path or entry.get("dev") or "version" not in entry:
            continue
        group, _, name = path.rpartition("node_modules/")[2].rpartition("/")
        algorithm, _, digest = entry.get("integrity", "").partition("-")
        purl = PackageURL("npm", group or None, name, entry["version"])
        yield Component(
            group=group or None,
            name=name,
            version=entry["version"],
            bom_ref=f"{path}@{entry['version']}",
            purl=purl,
            licenses=_make_licenses(entry.get("license")),
            hashes=[HashType(alg=HashAlgorithm.SHA_512, content=base64.b64decode(digest).hex())]
            if algorithm == "sha512"
            else (),
        )


def _make_licenses(text: str | None) -> list[License]:
    """An SPDX expression where it is one, else the name as it stands."""
    from cyclonedx.contrib.license.factories import LicenseFactory

    return [LicenseFactory().make_from_string(text)] if text else []


def make_bom(service: str, device: str, version: str, created: datetime.datetime) -> Bom:
    """Make the bill of materials of a service: `device` is cpu or gpu."""
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType

    lock = tools.HOMES[service] / ("requirements.gpu.lock" if device == "gpu" else "requirements.lock")
    text = lock.read_text(encoding="utf-8")
    components = list(read_python_components(text, find_licenses(service)))
    if service == "console":
        pages = (REPOSITORY / NODE_LOCK).read_text(encoding="utf-8")
        text += pages
        components += read_node_components(pages)
    name = f"forage-{service}" + ("-gpu" if device == "gpu" else "")
    root = Component(
        type=ComponentType.APPLICATION, name=name, version=version, bom_ref=name, licenses=_make_licenses("Apache-2.0")
    )
    bom = Bom(
        components=components,
        metadata=BomMetaData(component=root, timestamp=created),
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{name}@{version}\n{text}"),
    )
    bom.register_dependency(root, components)
    return bom


def render(bom: Bom) -> str:
    """Render a bill of materials as JSON of CycloneDX 1.6."""
    from cyclonedx.output.json import JsonV1Dot6

    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def find_errors(text: str) -> list[str]:
    """What the schema of CycloneDX 1.6 refuses in a document."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return [] if error is None else [str(error)]


def list_documents() -> list[tuple[str, str]]:
    """List every service and device that has a lock: its bill of materials is one document."""
    locks = sorted([*REPOSITORY.glob("cli/requirements*.lock"), *REPOSITORY.glob("services/*/requirements*.lock")])
    return [(lock.parent.name, "gpu" if lock.name == "requirements.gpu.lock" else "cpu") for lock in locks]


def write_boms(
    folder: Path, version: str, created: datetime.datetime, documents: Sequence[tuple[str, str]] = ()
) -> list[Path]:
    """Write and validate bills of materials, by default of every service and device.

    Raises:
        tools.ToolError: the library cannot be installed, or the schema refuses a document.
    """
    import_library()
    files = []
    for service, device in documents or list_documents():
        text = render(make_bom(service, device, version, created))
        if errors := find_errors(text):
            raise tools.ToolError(f"the bill of materials of {service} ({device}) is not valid: {errors[0][:300]}")
        files.append(folder / f"forage-{service}{'-gpu' if device == 'gpu' else ''}.cdx.json")
        files[-1].write_text(text, encoding="utf-8")
    return files


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: sbom.py FOLDER\n")
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    version = (REPOSITORY / "libs/runtime/forage_runtime/__init__.py").read_text(encoding="utf-8").split('"')[-2]
    try:
        files = write_boms(folder, version, datetime.datetime.now(datetime.UTC).replace(microsecond=0))
    except tools.ToolError as error:
        sys.stderr.write(f"sbom: {error}\n")
        return 2
    sys.stdout.writelines(f"  {file}\n" for file in files)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
