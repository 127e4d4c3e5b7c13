"""The list of other people's images, deploy/images.yaml, and the places that name them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = REPOSITORY / "deploy/images.yaml"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ImageListError(Exception):
    """The list, or a file that it names, is not as expected; the message names both and the remedy."""


@dataclass(frozen=True)
class Image:
    """One image by tag, in the files that name it.

    Attributes:
        name: as Docker writes it: `valkey/valkey`, or `python` for an official image.
        advisories: ecosystem, name and version in the OSV database; None if the tag says no version.
    """

    name: str
    tag: str
    digest: str
    used_by: tuple[str, ...]
    advisories: tuple[str, str, str] | None = None

    @property
    def reference(self) -> str:
        """Tag and, if it is known, digest: the digest decides, the tag is for people."""
        return f"{self.name}:{self.tag}" + (f"@{self.digest}" if self.digest else "")

    @property
    def repository(self) -> str:
        """Repository in the registry."""
        return self.name if "/" in self.name else f"library/{self.name}"


def load_images(file: Path = LIST) -> list[Image]:
    """Load the list.

    Raises:
        ImageListError: a field is missing or a digest is none.
    """
    images = []
    for number, entry in enumerate(yaml.safe_load(file.read_text(encoding="utf-8"))["images"]):
        missing = {"image", "tag", "digest", "used_by"} - set(entry)
        if missing:
            raise ImageListError(f"{file.name}: images[{number}] has no {', '.join(sorted(missing))}: add it")
        if entry["digest"] and not _DIGEST.fullmatch(entry["digest"]):
            raise ImageListError(
                f"{file.name}: the digest of {entry['image']} is '{entry['digest']}', expected sha256:<64 hex digits>"
            )
        images.append(
            Image(
                name=entry["image"],
                tag=str(entry["tag"]),
                digest=entry["digest"],
                used_by=tuple(entry["used_by"]),
                advisories=_read_identity(entry),
            )
        )
    return images


def _read_identity(entry: dict[str, Any]) -> tuple[str, str, str] | None:
    found = entry.get("advisories")
    return (found["ecosystem"], found["name"], str(found.get("version", entry["tag"]))) if found else None


def _make_patterns(name: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Make the patterns of an image in compose file and Dockerfile, and in values of the chart."""
    return (
        re.compile(rf"(?P<before>(?:image: |_IMAGE=){re.escape(name)}:)(?P<value>[^\s@]+(?:@sha256:[0-9a-f]{{64}})?)"),
        re.compile(
            rf"(?P<before>repository: {re.escape(name)}, tag: )(?P<value>\"?[^\s,\"]+\"?, digest: \"?[^\s}}\"]*\"?)"
        ),
    )


def write_image(text: str, image: Image) -> tuple[str, int]:
    """Write tag and digest of an image into the text of a file that names it, and count the places."""
    plain, values = _make_patterns(image.name)
    pinned = image.tag + (f"@{image.digest}" if image.digest else "")
    text, first = plain.subn(lambda match: match["before"] + pinned, text)
    text, second = values.subn(lambda match: f'{match["before"]}"{image.tag}", digest: "{image.digest}"', text)
    return text, first + second


def write_places(images: list[Image], root: Path = REPOSITORY) -> list[str]:
    """Write every image into the files that use it, and return the names of the files that changed.

    Raises:
        ImageListError: a file does not name an image that the list says it uses.
    """
    changed = []
    for file in sorted({file for image in images for file in image.used_by}):
        before = text = (root / file).read_text(encoding="utf-8")
        for image in images:
            if file in image.used_by:
                text, places = write_image(text, image)
                if not places:
                    raise ImageListError(f"{file} does not name {image.name}: correct used_by in {LIST.name}")
        if text != before:
            (root / file).write_text(text, encoding="utf-8")
            changed.append(file)
    return changed


def write_digests(images: list[Image], file: Path = LIST) -> None:
    """Write the digests into the list; comments and order stay."""
    text = file.read_text(encoding="utf-8")
    for image in images:
        entry = rf"(- image: {re.escape(image.name)}\n    tag: {re.escape(image.tag)}(?:\s+#.*)?\n    digest: ).*"
        text, places = re.subn(entry, rf'\g<1>"{image.digest}"', text)
        if places != 1:
            raise ImageListError(f"{file.name}: expected image, tag and digest of {image.name} in this order, once")
    file.write_text(text, encoding="utf-8")


def with_digest(image: Image, digest: str) -> Image:
    """Copy an image with another digest.

    Raises:
        ImageListError: not a digest.
    """
    if not _DIGEST.fullmatch(digest):
        raise ImageListError(f"the registry's digest of {image.name}:{image.tag} is '{digest}', expected sha256:…")
    return replace(image, digest=digest)
