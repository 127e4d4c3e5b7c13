"""The manifest of a generated data set: its counts and the digests of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path


def write_manifest(
    folder: Path, counts: Mapping[str, object], names: Iterable[str], packages: Iterable[str]
) -> dict[str, str]:
    """Write `manifest.json`: counts, digests of the named files, and versions of the source packages.

    Returns:
        SHA-256 digests by file name.
    """
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    manifest = {**counts, "sha256": digests, "packages": {name: version(name) for name in packages}}
    text = json.dumps(manifest, indent=2, sort_keys=True)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")
    return digests
