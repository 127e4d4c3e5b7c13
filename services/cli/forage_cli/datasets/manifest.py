"""The manifest of a generated data set: its counts and the digests of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Hash files of a folder; returns SHA-256 digests by name."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def write_manifest(
    folder: Path, counts: Mapping[str, object], digests: Mapping[str, str], packages: Iterable[str]
) -> None:
    """Write `manifest.json`: counts, digests by file name, and versions of the source packages."""
    manifest = {**counts, "sha256": dict(digests), "packages": {name: version(name) for name in packages}}
    text = json.dumps(manifest, indent=2, sort_keys=True)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")
