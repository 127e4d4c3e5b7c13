"""Resolves the tags of deploy/images.yaml into digests, and writes both into the files that use the images.

    resolve_images.py            ask the registries, write the digests, then the files
    resolve_images.py --offline  only write the files, from the list as it is

A tag can be moved to another image; a digest cannot. The digest is that of the tag's index of platforms, so that it
serves every architecture. Exit code 2 if a registry cannot be asked: nothing is written then.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import httpx
from third_party_images import LIST, Image, ImageListError, load_images, with_digest, write_digests, write_places

REGISTRY = "https://registry-1.docker.io"
INDEXES = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistryError(Exception):
    """A registry gave no digest; the message names the image, the reason and the remedy."""


def resolve_digest(image: Image, client: httpx.Client) -> str:
    """Ask the registry for the digest of an image's tag, with an anonymous token where it wants one.

    Raises:
        RegistryError: no answer, no such tag, or an answer without a digest.
    """
    path = f"/v2/{image.repository}/manifests/{image.tag}"
    try:
        answer = client.head(path, headers={"Accept": INDEXES})
        if answer.status_code == 401:
            token = _fetch_token(answer.headers.get("WWW-Authenticate", ""), client)
            answer = client.head(path, headers={"Accept": INDEXES, "Authorization": f"Bearer {token}"})
    except httpx.HTTPError as error:
        raise RegistryError(
            f"{client.base_url.host} cannot be reached for {image.name}:{image.tag} ({error or type(error).__name__}): "
            "run this where the registry can be reached; until then the tags decide, and nothing was changed"
        ) from None
    digest = answer.headers.get("Docker-Content-Digest", "")
    if answer.status_code != 200 or not digest:
        raise RegistryError(
            f"{client.base_url.host} answers {answer.status_code} without a digest for {image.name}:{image.tag}: "
            f"correct the tag in {LIST.name}"
        )
    return str(digest)


def _fetch_token(challenge: str, client: httpx.Client) -> str:
    fields = dict(_CHALLENGE.findall(challenge))
    if "realm" not in fields:
        raise RegistryError(f"{client.base_url.host} asks for a login that is no bearer token: '{challenge}'")
    answer = client.get(fields.pop("realm"), params=fields)
    token = answer.json().get("token", "") if answer.status_code == 200 else ""
    if not token:
        raise RegistryError(f"{answer.url.host} answers {answer.status_code} without an anonymous token")
    return str(token)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="do not ask the registries")
    parser.add_argument("--registry", default=REGISTRY, help=f"a mirror of it (default: {REGISTRY})")
    options = parser.parse_args(arguments)
    try:
        images = load_images()
        if not options.offline:
            with httpx.Client(base_url=options.registry, timeout=20, follow_redirects=True) as client:
                images = [with_digest(image, resolve_digest(image, client)) for image in images]
            write_digests(images)
        changed = write_places(images)
    except (ImageListError, RegistryError) as error:
        print(f"resolve_images: {error}", file=sys.stderr)
        return 2
    for image in images:
        print(f"  {image.reference}")
    print(f"written: {', '.join(changed) or 'nothing, all files had these'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
