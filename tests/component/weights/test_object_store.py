"""Policies in an object store: a real server of the S3 protocol, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from policy_files import Publications
from s3_server import BUCKET, serve_s3

from forage_runtime.files.remote import StorageError
from forage_weights.announcement import PolicyError
from forage_weights.cache import PolicyCache
from forage_weights.storage import delete_folder, get_file, list_folders, put_files

ROOT = f"s3://{BUCKET}/run"


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]) -> Iterator[dict[str, str]]:
    log = tmp_path_factory.mktemp("s3") / "log"
    with serve_s3(free_address().rpartition(":")[2], log) as environment:
        yield environment


@pytest.fixture
def published(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Publications:
    use(monkeypatch, server)
    return Publications(f"{ROOT}/{tmp_path.name}", tmp_path / "scratch")


def test_policies_are_published_fetched_and_deleted(published: Publications, tmp_path: Path) -> None:
    cache, late = PolicyCache(tmp_path / "cache"), PolicyCache(tmp_path / "late")
    with cache.hold(published.publish()) as held:
        assert published.is_held(held)
        assert held.deltas == ()
    for _ in range(2):
        policy = published.publish()
        with cache.hold(policy) as held:
            assert published.is_held(held)
    with late.hold(policy) as held:  # it takes the whole first one and both deltas
        assert published.is_held(held)
        assert len(held.deltas) == 2
    assert list_folders(published.uri) == ["v1", "v2", "v3"]
    policy = published.publish(delta=False)
    for version in ("v1", "v2", "v3"):
        delete_folder(f"{published.uri}/{version}")
        delete_folder(f"{published.uri}/{version}")  # one that is gone
    assert list_folders(published.uri) == ["v4"]
    with cache.hold(policy) as held:
        assert published.is_held(held)


def test_a_file_of_several_ranges_arrives_as_it_was_sent(published: Publications, tmp_path: Path) -> None:
    content = bytes(range(256)) * (160 * 1024)  # 40 MiB: three ranges, and an upload in parts
    (tmp_path / "file").write_bytes(content)
    put_files(published.uri, {"file": tmp_path / "file"})
    get_file(published.uri, "file", tmp_path / "copy", len(content))
    assert (tmp_path / "copy").read_bytes() == content


def test_a_truncated_upload_is_refused_and_can_be_repaired(published: Publications, tmp_path: Path) -> None:
    cache = PolicyCache(tmp_path / "cache")
    with cache.hold(published.publish()):
        pass
    policy = published.publish()
    path = f"{policy.uri}/delta".removeprefix("s3://")
    store = fsspec.filesystem("s3")
    content = store.cat_file(path)
    store.pipe_file(path, content[:-9])
    with pytest.raises(PolicyError, match=r"delta has \d+ bytes, expected \d+: its upload is not complete"):
        cache.hold(policy).__enter__()
    store.rm(path)
    with pytest.raises(PolicyError, match=r"delta cannot be read \(FileNotFoundError"):
        cache.hold(policy).__enter__()
    store.pipe_file(path, content)
    with cache.hold(policy) as held:
        assert published.is_held(held)


def test_an_upload_that_is_not_complete_is_not_taken_for_one(
    published: Publications, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    store = fsspec.get_filesystem_class("s3")
    monkeypatch.setattr(store, "put_file", lambda self, local, path: self.pipe_file(path, b"weig"))
    with pytest.raises(StorageError, match="file has 4 bytes after its upload, expected 7"):
        put_files(published.uri, {"file": tmp_path / "file"})


def test_a_missing_bucket_is_a_clear_error(published: Publications, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    with pytest.raises(
        StorageError, match=r"^s3://absent/v1: file cannot be written .*check that its bucket or folder"
    ):
        put_files("s3://absent/v1", {"file": tmp_path / "file"})
    policy = published.publish()
    policy.uri = "s3://absent/v1"
    with pytest.raises(PolicyError, match=r"cannot be fetched: s3://absent/v1: .*check that its bucket or folder"):
        PolicyCache(tmp_path / "cache").hold(policy).__enter__()


def test_a_whole_bucket_is_never_deleted(published: Publications) -> None:
    published.publish()
    with pytest.raises(StorageError, match="no folder within a bucket"):
        delete_folder(f"s3://{BUCKET}")
    with pytest.raises(StorageError, match="no folder within a bucket"):
        delete_folder(f"s3://{BUCKET}/")
    assert list_folders(published.uri) == ["v1"]


def test_wrong_credentials_are_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_address: Callable[[], str]
) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    with serve_s3(free_address().rpartition(":")[2], tmp_path / "log", authenticate=True) as environment:
        use(monkeypatch, environment)
        for call in (
            lambda: put_files(ROOT, {"file": tmp_path / "file"}),
            lambda: get_file(ROOT, "file", tmp_path / "copy"),
            lambda: list_folders(ROOT),
            lambda: delete_folder(ROOT),
        ):
            with pytest.raises(StorageError, match=rf"^{ROOT}: .*: check the credentials for this address$"):
                call()
    assert not (tmp_path / "copy").exists()


def test_a_server_that_is_away_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_address: Callable[[], str], server: dict[str, str]
) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    use(monkeypatch, server | {"AWS_ENDPOINT_URL_S3": f"http://{free_address()}", "AWS_MAX_ATTEMPTS": "1"})
    with pytest.raises(StorageError, match=rf"^{ROOT}: file cannot be read \(.*\): check the endpoint"):
        get_file(ROOT, "file", tmp_path / "copy", 7)
