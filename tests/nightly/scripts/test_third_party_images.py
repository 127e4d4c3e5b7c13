"""`deploy/images.yaml` and the files that name its images; digests come from a registry's own interface."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import resolve_images
from third_party_images import (
    LIST,
    REPOSITORY,
    Image,
    ImageListError,
    load_images,
    write_digests,
    write_image,
    write_places,
)

DIGEST = f"sha256:{'5e' * 32}"
NAMED = re.compile(r"(?m)^ *(?:image: |ARG \w+_IMAGE=)((?!\$)\S+)$")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the list and of every file that names its images."""
    for file in ("deploy/images.yaml", *{file for image in load_images() for file in image.used_by}):
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, target)
    return tmp_path


def test_every_file_names_the_images_as_the_list_does(tree: Path) -> None:
    assert write_places(load_images(), tree) == [], "run 'python scripts/resolve_images.py --offline' and commit"


@pytest.mark.parametrize("file", ["docker-compose.yml", "services/Dockerfile"])
def test_no_file_names_an_image_that_is_not_on_the_list(file: str) -> None:
    named = NAMED.findall((REPOSITORY / file).read_text())
    assert named
    assert {name for name in named if "FORAGE_VERSION" not in name} == {
        image.reference for image in load_images() if file in image.used_by
    }


def test_every_file_gets_the_digest_beside_the_tag(tree: Path) -> None:
    pinned = [resolve_images.with_digest(image, DIGEST) for image in load_images()]
    write_digests(pinned, tree / "deploy/images.yaml")
    assert load_images(tree / "deploy/images.yaml") == pinned
    assert write_places(pinned, tree) == ["deploy/helm/forage/values.yaml", "docker-compose.yml", "services/Dockerfile"]
    assert f"image: prom/prometheus:v3.13.3@{DIGEST}\n" in (tree / "docker-compose.yml").read_text()
    assert f'tag: "8.1.10", digest: "{DIGEST}"}}' in (tree / "deploy/helm/forage/values.yaml").read_text()
    assert write_places(pinned, tree) == []


def test_a_new_tag_replaces_the_old_digest() -> None:
    image = Image("prom/prometheus", "v9.0.0", "", ())
    text, places = write_image(f"    image: prom/prometheus:v3.13.3@{DIGEST}\n", image)
    assert (text, places) == ("    image: prom/prometheus:v9.0.0\n", 1)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{image: a/b, tag: 1, used_by: []}", "images[0] has no digest: add it"),
        ("{image: a/b, tag: 1, digest: sha256:12, used_by: []}", "the digest of a/b is 'sha256:12', expected sha256:"),
    ],
)
def test_a_wrong_list_is_refused(entry: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "images.yaml"
    file.write_text(f"images: [{entry}]")
    with pytest.raises(ImageListError, match=re.escape(message)):
        load_images(file)


class _Registry(BaseHTTPRequestHandler):
    """The part of a registry's interface that resolves tags: a challenge, anonymous tokens, manifests."""

    def do_GET(self) -> None:
        self._answer(200, body=json.dumps({"token": "anonymous"}))

    def do_HEAD(self) -> None:
        if self.headers.get("Authorization") != "Bearer anonymous":
            realm = f"http://{self.headers['Host']}/token"
            self._answer(401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="registry"'})
        elif "image.index" not in self.headers["Accept"] or "/manifests/gone" in self.path:
            self._answer(404)
        else:
            self._answer(200, {"Docker-Content-Digest": DIGEST})

    def _answer(self, status: int, headers: dict[str, str] | None = None, body: str = "") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[httpx.Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}") as client:
        yield client
    server.shutdown()
    server.server_close()


def test_a_registry_gives_the_digest_of_a_tag(registry: httpx.Client) -> None:
    assert resolve_images.resolve_digest(Image("python", "3.11", "", ()), registry) == DIGEST


def test_a_tag_that_does_not_exist_is_named(registry: httpx.Client) -> None:
    with pytest.raises(resolve_images.RegistryError, match=r"404 without a digest for a/b:gone: correct the tag"):
        resolve_images.resolve_digest(Image("a/b", "gone", "", ()), registry)


def test_without_a_registry_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    before = LIST.read_text()
    assert resolve_images.main(["--registry", "http://127.0.0.1:9"]) == 2
    assert "127.0.0.1 cannot be reached for valkey/valkey:" in capsys.readouterr().err
    assert LIST.read_text() == before
