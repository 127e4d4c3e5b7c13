"""Search-R1's corpus and FAISS file come from a server that stands for the Hub."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, serve_files
from typer.testing import CliRunner

from forage_retriever.command import wiki18
from forage_retriever.command.main import app
from forage_retriever.command.wiki18 import fetch_wiki18
from forage_retriever.index import download
from forage_retriever.index.download import DownloadError
from forage_runtime.errors import DataError, SettingsError, UserError

LINES = "".join(json.dumps({"id": str(n), "contents": f'"Place {n}"\nText {n}.'}) + "\n" for n in range(500)).encode()
PACKED = gzip.compress(LINES)
PARTS = {"part_aa": random.Random(0).randbytes(70_000), "part_ab": random.Random(1).randbytes(30_000)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serve_files() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.files = {"datasets/PeterJinGo/wiki-18-corpus/resolve/main/wiki-18.jsonl.gz": PACKED}
        for name, content in PARTS.items():
            server.files[f"datasets/PeterJinGo/wiki-18-e5-index/resolve/main/{name}"] = content
        yield server


def fetch(out: Path, index: str = "", *pinned: str) -> list[str]:
    return fetch_wiki18(out, index, pinned, lambda *_: None)


def test_the_corpus_is_unpacked_and_the_parts_of_the_index_are_joined(hub: FileServer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["wiki18", "--out", str(tmp_path / "wiki-18"), "--index", "e5-flat"])
    assert done.exit_code == 0, done.output
    assert "next: forage index convert indexes/wiki-18-flat --faiss" in done.output
    out = tmp_path / "wiki-18"
    assert (out / "corpus.jsonl").read_bytes() == LINES
    assert (out / "e5_Flat.index").read_bytes() == b"".join(PARTS.values())
    assert {path.name for path in out.iterdir()} == {"corpus.jsonl", "e5_Flat.index", "sources.json"}
    kept = json.loads((out / "sources.json").read_text())
    assert {name: entry["sha256"] for name, entry in kept.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in {"wiki-18.jsonl.gz": PACKED, **PARTS}.items()
    }
    before = len(hub.requests)
    assert "next: forage index build" in fetch(out)[-1]
    assert len(hub.requests) == before, "everything is there"


def test_a_connection_that_breaks_off_is_taken_up(hub: FileServer, tmp_path: Path) -> None:
    hub.break_after = 40_000
    fetch(tmp_path, "e5-flat")
    assert (tmp_path / "e5_Flat.index").read_bytes() == b"".join(PARTS.values())
    assert any(asked == "bytes=40000-" for _, _, asked in hub.requests)


def test_what_was_joined_in_part_is_joined_again(hub: FileServer, tmp_path: Path) -> None:
    name = "datasets/PeterJinGo/wiki-18-e5-index/resolve/main/part_ab"
    hub.statuses = {name: 503}
    with pytest.raises(DownloadError, match="part_ab answers 503: try again later"):
        fetch(tmp_path, "e5-flat")
    with (tmp_path / "part_aa").open("ab") as first:
        first.write(PARTS["part_ab"][:999])
    hub.statuses = {}
    fetch(tmp_path, "e5-flat")
    assert (tmp_path / "e5_Flat.index").read_bytes() == b"".join(PARTS.values())


def test_a_file_that_is_not_that_of_the_first_time_is_refused(hub: FileServer, tmp_path: Path) -> None:
    fetch(tmp_path)
    (tmp_path / "corpus.jsonl").unlink()
    (path,) = [path for path in hub.files if path.endswith("gz")]
    hub.files[path] = gzip.compress(LINES.replace(b"Text", b"Lies"))
    with pytest.raises(DownloadError, match=r"has (the SHA-256 \w+, expected|more than)"):
        fetch(tmp_path)
    assert not (tmp_path / "corpus.jsonl").exists()
    hub.files[path] = PACKED
    fetch(tmp_path)


def test_a_digest_is_pinned_before_the_first_time(hub: FileServer, tmp_path: Path) -> None:
    digest = hashlib.sha256(PACKED).hexdigest()
    with pytest.raises(DownloadError, match=f"has the SHA-256 {digest}, expected {'0' * 64}"):
        fetch(tmp_path, "", f"wiki-18.jsonl.gz={'0' * 64}")
    assert not (tmp_path / "corpus.jsonl").exists()
    fetch(tmp_path, "", f"wiki-18.jsonl.gz={digest}")
    with pytest.raises(DataError, match=r"has .* of it: delete"):
        fetch(tmp_path, "", f"wiki-18.jsonl.gz={'0' * 64}")


def test_the_digest_that_the_hub_gives_is_checked(hub: FileServer, tmp_path: Path) -> None:
    (path,) = [path for path in hub.files if path.endswith("gz")]
    hub.headers = {path: {"x-linked-etag": f'"{"1" * 64}"'}}
    with pytest.raises(DownloadError, match=f"expected {'1' * 64}"):
        fetch(tmp_path)


@pytest.mark.parametrize(
    ("index", "pinned", "sentence"),
    [
        ("e5-ivf", (), "--index is 'e5-ivf': give e5-flat"),
        ("", ("part_aa=" + "0" * 64,), r"give FILE=DIGEST .*of wiki-18\.jsonl\.gz$"),
        ("e5-flat", ("part_aa=0",), "'part_aa=0': give FILE=DIGEST"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, index: str, pinned: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        fetch(tmp_path, index, *pinned)


def test_what_is_no_gzip_or_a_bomb_is_refused(hub: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = [path for path in hub.files if path.endswith("gz")]
    hub.files[path] = PACKED[:-20]
    with pytest.raises(DataError, match="is not gzip, or damaged"):
        fetch(tmp_path / "cut")
    monkeypatch.setattr(wiki18, "_BLOCK", 2**16)
    hub.files[path] = gzip.compress(b"0" * 2**24)
    with pytest.raises(DataError, match="unpacks to more than 12 times its size"):
        fetch(tmp_path / "bomb")
    assert not list(tmp_path.rglob("corpus.jsonl"))


def test_without_a_network_the_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set: unset it, or copy the files here"):
        fetch(tmp_path)
    assert not (tmp_path / "corpus.jsonl").exists()
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied/wiki-18.jsonl.gz").write_bytes(PACKED)
    fetch_wiki18(tmp_path / "out", "", [], lambda *_: None, str(tmp_path / "copied"))
    assert (tmp_path / "out/corpus.jsonl").read_bytes() == LINES
