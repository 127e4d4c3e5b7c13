"""Indexes are copied from addresses whole and checked, or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from file_server import FileServer, serve_files
from full_disk import SmallDisk

from forage_retriever.index import download, manifest, space
from forage_retriever.index.build import build_index
from forage_retriever.index.download import DownloadError, open_folder
from forage_retriever.index.pull import pull_index, push_index
from forage_retriever.index.recipe import Recipe
from forage_runtime.errors import DiskFullError, SettingsError, UserError
from forage_runtime.settings import RetrievalMode, RetrieverSettings


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("built")
    rows = ({"id": str(n), "contents": f'"Place {n}"\nNumber {n} has a port.'} for n in range(300))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe.from_settings(RetrieverSettings(mode=RetrievalMode.BM25), None)

    def begin(shards: int) -> Path:
        final = folder / f"index-{shards}"
        build_index(final, folder / f".{final.name}", folder / "corpus.jsonl", recipe, lambda *_: None, shards)
        return final

    return begin


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve_files() as server:
        yield server


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def read_tree(folder: Path) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in files.items() if not name.endswith(".lock")}


def pull(url: str, final: Path, sha256: str = "", seen: list[tuple[int, int | None]] | None = None) -> bool:
    def report(stage: str, done: int, total: int | None) -> None:
        if seen is not None:
            seen.append((done, total))

    return pull_index(url, final, final.parent / f".{final.name}.pulling", report, sha256)


@pytest.mark.parametrize("shards", [1, 2])
def test_an_index_is_pulled_over_http_and_searched(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path, shards: int
) -> None:
    server.files = {f"wiki/{name}": content for name, content in read_tree(built(shards)).items()}
    seen: list[tuple[int, int | None]] = []
    assert pull(f"{server.url}/wiki", tmp_path / "new", seen=seen)
    assert read_tree(tmp_path / "new") == read_tree(built(shards))
    for one in manifest.list_shards(tmp_path / "new") or [tmp_path / "new"]:
        assert manifest.check_files(one, manifest.read_manifest(one)) == []
    assert seen[-1][0] == seen[-1][1] == sum(total for _, total in seen[-1:] if total)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not pull(f"{server.url}/wiki", tmp_path / "new"), "it is there already"


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_broken_connection_is_taken_up_where_it_ended(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path, has_ranges: bool
) -> None:
    server.files = read_tree(built(1))
    largest = max(map(len, server.files.values()))
    server.break_after, server.has_ranges = largest // 3 + 1, has_ranges
    if has_ranges:
        assert pull(server.url, tmp_path / "new")
        assert read_tree(tmp_path / "new") == server.files
        assert any(asked.startswith("bytes=") for _, _, asked in server.requests)
        return
    with pytest.raises(DownloadError, match="run the same command again to go on from there"):
        pull(server.url, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    server.break_after, before = 0, len(server.requests)
    assert pull(server.url, tmp_path / "new")
    assert read_tree(tmp_path / "new") == server.files
    assert len(server.requests) > before


def test_a_killed_pull_fetches_only_what_is_missing(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path
) -> None:
    server.files = read_tree(built(1))
    last = [name for name in manifest.read_manifest(built(1)).files][-1]
    server.statuses = {last: 500}
    with pytest.raises(DownloadError, match=f"{last} answers 500"):
        pull(server.url, tmp_path / "new")
    server.statuses, server.requests = {}, []
    assert pull(server.url, tmp_path / "new")
    assert {path for method, path, _ in server.requests if method == "GET"} == {"manifest.json", last}


def test_another_index_at_the_address_starts_again(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path
) -> None:
    server.files = {name: bytes(reversed(content)) for name, content in read_tree(built(1)).items()}
    server.files["manifest.json"] = (built(1) / "manifest.json").read_bytes()
    name = next(iter(manifest.read_manifest(built(1)).files))
    with pytest.raises(DownloadError, match=f"{name} has the SHA-256 [0-9a-f]+, expected .*deleted"):
        pull(server.url, tmp_path / "new")
    changed = manifest.read_manifest(built(1)).model_copy(update={"recipe": "another"})
    manifest.write_manifest(tmp_path, changed)
    server.files = read_tree(built(1)) | {"manifest.json": (tmp_path / "manifest.json").read_bytes()}
    assert pull(server.url, tmp_path / "new")
    assert manifest.read_manifest(tmp_path / "new").recipe == "another"


def test_a_manifest_is_pinned_by_its_digest(built: Callable[[int], Path], tmp_path: Path) -> None:
    content = (built(1) / "manifest.json").read_bytes()
    with pytest.raises(UserError, match=r"--sha256 is 0{64}: it is another index"):
        pull(str(built(1)), tmp_path / "new", "0" * 64)
    with pytest.raises(SettingsError, match="'abc': give 64"):
        pull(str(built(1)), tmp_path / "new", "abc")
    assert pull(f"file://{built(1)}", tmp_path / "new", hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "bm25/../../outside",
        "bm25//x",
        "bm25/..",
        "a\\b",
        "bm25/\u202e",
        "manifest.json",
        "",
    ],
)
def test_a_manifest_that_names_files_elsewhere_is_refused(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path, name: str
) -> None:
    entry = manifest.FileEntry(bytes=7, sha256=hashlib.sha256(b"hostile").hexdigest())
    description = manifest.read_manifest(built(1))
    manifest.write_manifest(tmp_path, description.model_copy(update={"files": {name: entry}}))
    server.files = {"manifest.json": (tmp_path / "manifest.json").read_bytes(), "outside": b"hostile"}
    with pytest.raises(UserError, match="not to be trusted"):
        pull(server.url, tmp_path / "deep/new")
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize("entry", [{"bytes": -1, "sha256": "0" * 64}, {"bytes": 1, "sha256": "../x"}])
def test_a_manifest_of_impossible_files_is_refused(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path, entry: dict[str, Any]
) -> None:
    files = {"corpus/rows.bin": manifest.FileEntry(**entry)}
    manifest.write_manifest(tmp_path, manifest.read_manifest(built(1)).model_copy(update={"files": files}))
    server.files = {"manifest.json": (tmp_path / "manifest.json").read_bytes()}
    with pytest.raises(UserError, match="not to be trusted"):
        pull(server.url, tmp_path / "new")


def test_more_bytes_than_announced_are_not_written(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path
) -> None:
    server.files = {name: content + b"x" * 10 for name, content in read_tree(built(1)).items()}
    server.files["manifest.json"] = (built(1) / "manifest.json").read_bytes()
    with pytest.raises(DownloadError, match="has more than"):
        pull(server.url, tmp_path / "new")


def test_room_is_asked_for_before_anything_is_fetched(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files = read_tree(built(1))
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(UserError, match=r"the files of the index need .* of which 100 bytes are free"):
        pull(server.url, tmp_path / "new")
    assert {path for _, path, _ in server.requests} == {"manifest.json"}


def test_a_disk_that_fills_up_keeps_what_was_fetched(
    built: Callable[[int], Path],
    server: FileServer,
    small_disk: SmallDisk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.files = read_tree(built(1))
    monkeypatch.setattr(space, "check_disk", lambda *_: small_disk.fill())
    with pytest.raises((DiskFullError, UserError), match="free"):
        pull(server.url, small_disk.path / "new")
    assert not (small_disk.path / "new").exists()
    small_disk.free()
    monkeypatch.undo()
    assert pull(server.url, small_disk.path / "new")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://127.0.0.1:1/wiki", r"cannot be reached .*check the network.*or copy the files here"),
        ("{server}/none", r"none/shard-0/manifest.json does not exist \(404\).*nor has it shard-0"),
        ("{tmp}/none", "does not exist: check the address; nor has it shard-0"),
        ("nothing://a/b", "nothing installed reads this address .*install its fsspec package"),
        ("simplecache::s3://bucket/x", "is no address"),
        ("", "is no address"),
        ("hf://datasets/owner", "is no address on the Hub"),
        ("http://user:secret@127.0.0.1:1/wiki", r"http://\*\*\*@127.0.0.1:1/wiki/manifest.json cannot be reached"),
    ],
)
def test_an_address_that_cannot_be_read_is_named_with_the_remedy(
    server: FileServer, tmp_path: Path, url: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        pull(url.format(server=server.url, tmp=tmp_path), tmp_path / "new")
    assert "secret" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_a_redirect_to_another_host_is_not_followed(server: FileServer, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    server.statuses = {"manifest.json": 302}
    server.headers = {"manifest.json": {"location": f"http://localhost:{port}/elsewhere"}}
    server.files = {"elsewhere": b"{}"}
    with pytest.raises(DownloadError, match="leads to http://localhost, which is not its host"):
        pull(server.url, tmp_path / "new")
    assert {path for _, path, _ in server.requests} == {"manifest.json"}


def test_the_hub_is_read_with_its_token_and_not_when_it_is_forbidden(
    built: Callable[[int], Path], server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    prefix = "datasets/owner/name/resolve/v1/wiki/"
    server.files = {f"{prefix}{name}": content for name, content in read_tree(built(1)).items()}
    assert pull("hf://datasets/owner/name@v1/wiki", tmp_path / "new")
    server.statuses = {f"{prefix}manifest.json": 401}
    with pytest.raises(DownloadError, match=r"not given to you \(401\): set HF_TOKEN"):
        pull("hf://datasets/owner/name@v1/wiki", tmp_path / "other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        open_folder("hf://datasets/owner/name@v1/wiki")


def test_an_index_is_pushed_and_pulled_again(built: Callable[[int], Path], tmp_path: Path) -> None:
    for shards in (1, 2):
        push_index(built(shards), f"file://{tmp_path}/store/{shards}", lambda *_: None)
        assert pull(f"{tmp_path}/store/{shards}", tmp_path / f"new-{shards}")
        assert read_tree(tmp_path / f"new-{shards}") == read_tree(built(shards))
    with pytest.raises(SettingsError, match="is not written: give a folder, s3:// or gs://"):
        push_index(built(1), "https://host/x", lambda *_: None)
    with pytest.raises(UserError, match="is not an index"):
        push_index(tmp_path, f"{tmp_path}/other", lambda *_: None)
