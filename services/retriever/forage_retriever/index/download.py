"""Files at any address: read from where an interrupted download ended, with their size and digest checked.

HTTP addresses, and hf:// as the Hub's, are read directly; every other scheme, and paths, by fsspec. Redirects lead to
the address's own host only, and never from HTTPS to HTTP. Credentials come from the environment, never from a manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from forage_runtime.errors import UserError
from forage_runtime.files.durable import detect_full_disk
from forage_runtime.files.remote import UnknownAddressError, open_address
from forage_runtime.settings.base import check_url
from forage_runtime.text.redaction import redact_text

_BLOCK = 2**20
_RANGE = 32 * 2**20
_TIMEOUT_S = 60.0
_FAILURES = 5
"""Attempts one after the other that bring no byte, after which a download ends."""

_PAUSE_S = 1.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)
_HUB = "https://huggingface.co"
_CONTENT_HOSTS = (".hf.co", ".huggingface.co")
"""To which the Hub redirects for the contents of large files."""

_NO_HEAD = (403, 405, 501)
"""Answers of servers, and of signed addresses, that allow to read a file but not to ask about it."""

_COPY = "copy the files here in another way and give their folder"


class DownloadError(UserError):
    """An address cannot be read, or gives other bytes; the sentence holds no credentials."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact_text(sentence))


class MissingFileError(DownloadError):
    """There is no such file at the address."""


class InterruptedReadError(DownloadError):
    """A read broke off, or the address cannot be reached now: it may succeed later."""


@dataclass(frozen=True)
class RemoteFile:
    """What an address says about a file: bytes, and the SHA-256 of its content; None and "" where it does not."""

    bytes: int | None
    sha256: str


class RemoteFolder(Protocol):
    """A folder at an address; every method raises `DownloadError`."""

    def describe(self, name: str) -> RemoteFile:
        """The file of this name, a path with slashes."""
        ...

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        """The file's bytes from `begin` on."""
        ...


def check_address(url: str) -> None:
    """Check an address before a library reads it, whose errors may quote a part of a password.

    Raises:
        DownloadError: its user or password is not percent-encoded, or it has no such port.
    """
    try:
        check_url(url)
    except ValueError as error:
        raise DownloadError(f"the address is not shown, as it may hold a password: {error}") from None


def open_file_system(url: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the folder's path in it.

    Raises:
        DownloadError: nothing installed reads it.
    """
    try:
        return open_address(url)
    except UnknownAddressError as error:
        raise DownloadError(
            f"{url}: nothing installed reads this address ({error}): install its fsspec package"
        ) from None


def open_folder(url: str) -> RemoteFolder:
    """The folder at a path or URL.

    Raises:
        DownloadError: the address is malformed, forbidden now, or nothing installed reads it.
    """
    if "::" in url or not url.isprintable() or not url:
        raise DownloadError(
            f"{ascii(url)[:200]} is no address: give a folder or one URL, such as s3://bucket/indexes/wiki"
        )
    check_address(url)
    if url.startswith("hf://"):
        url = _find_on_hub(url)
    if url.startswith(("http://", "https://")):
        return _HttpFolder(url)
    return _FsspecFolder(url)


def download(
    folder: RemoteFolder,
    name: str,
    target: Path,
    size: int | None,
    sha256: str = "",
    progress: Callable[[int], None] = lambda read: None,
    limit: int = 2**43,
) -> str:
    """Download a file, or what an interrupted download has not got of it yet.

    Args:
        target: where it is written; its folder exists.
        size: bytes that it must have; None: what the address gives until its end.
        sha256: that it must have; empty: any.
        progress: gets the bytes that were read since its last call, also those of before.
        limit: bytes that it must not exceed where its size is unknown.

    Returns:
        Its SHA-256.

    Raises:
        DownloadError: it cannot be read, or is another file; then it is deleted.
        DiskFullError: there is no room for it.
    """
    most = limit if size is None else size
    if target.exists() and target.stat().st_size > most:
        target.unlink()
    digest, failures = hashlib.sha256(), 0
    with detect_full_disk(target), target.open("a+b") as out:
        out.seek(0)
        while block := out.read(_BLOCK):
            digest.update(block)
            progress(len(block))
        while size is None or out.tell() < size:
            before = out.tell()
            try:
                for block in folder.read(name, before):
                    if out.tell() + len(block) > most:
                        raise _make_unequal_error(out, name, f"has more than {most} bytes")
                    out.write(block)
                    digest.update(block)
                    progress(len(block))
                if size is None:
                    break
                if out.tell() < size:
                    raise InterruptedReadError(
                        f"{name} ends after {out.tell()} of {size} bytes: its upload is not complete"
                    )
            except InterruptedReadError:
                failures = failures + 1 if out.tell() == before else 0
                if failures >= _FAILURES:
                    raise
                time.sleep(_PAUSE_S)  # wait: a pause between two attempts, whose number is limited
        if sha256 and digest.hexdigest() != sha256:
            raise _make_unequal_error(out, name, f"has the SHA-256 {digest.hexdigest()}, expected {sha256}")
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _make_unequal_error(out: Any, name: str, problem: str) -> DownloadError:
    out.truncate(0)
    return DownloadError(
        f"{name} {problem}: what was fetched of it is deleted; run the same command again, and if it stays so, the"
        " address has another file than was announced"
    )


class _HttpFolder:
    def __init__(self, url: str) -> None:
        self._url, mark, query = url.partition("?")
        self._query = mark + query  # of a signed address
        try:
            self._base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise DownloadError(f"{url} is no URL ({error}): give https://HOST/PATH") from None
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on") and self._is_hub:
            raise DownloadError(f"{url} is not read, because HF_HUB_OFFLINE is set: unset it, or {_COPY}")
        token = os.environ.get("HF_TOKEN", "") if self._is_hub else ""
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {})
        self._client = httpx.Client(
            follow_redirects=True, timeout=_TIMEOUT_S, headers=headers, event_hooks={"request": [self._check_host]}
        )

    @property
    def _is_hub(self) -> bool:
        return self._base.host == httpx.URL(os.environ.get("HF_ENDPOINT", _HUB)).host

    def describe(self, name: str) -> RemoteFile:
        with self._explain(name):
            reply = self._client.head(self._name(name))
            if reply.status_code in _NO_HEAD:
                return RemoteFile(None, "")
            self._check_status(reply, name)
        first = next(iter(reply.history), reply)
        # The Hub names a large file by the SHA-256 of its content, before it redirects to it.
        linked = first.headers.get("x-linked-etag", "").strip('"') if self._is_hub else ""
        length = reply.headers.get("content-length", "")
        size = int(length) if length.isdecimal() and len(length) < 16 else None
        return RemoteFile(size, linked if _SHA256.fullmatch(linked) else "")

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        headers = {"range": f"bytes={begin}-"} if begin else {}
        with self._explain(name), self._client.stream("GET", self._name(name), headers=headers) as reply:
            self._check_status(reply, name)
            skipped = begin if reply.status_code == httpx.codes.OK else 0  # a server that reads whole files only
            place = reply.headers.get("content-range", "")
            if not skipped and begin and not place.startswith(f"bytes {begin}-"):
                raise DownloadError(
                    f"{self._name(name)} answers with other bytes ({place!r}) than those from {begin} on"
                )
            for block in reply.iter_raw():
                if skipped >= len(block):
                    skipped -= len(block)
                    continue
                yield block[skipped:]
                skipped = 0

    def _name(self, name: str) -> str:
        return f"{self._url.rstrip('/')}/{name}{self._query}"

    def _check_status(self, reply: httpx.Response, name: str) -> None:
        code, url = reply.status_code, self._name(name)
        if code == httpx.codes.NOT_FOUND:
            raise MissingFileError(f"{url} does not exist (404): check the address")
        if code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            how = "set HF_TOKEN, and accept the terms on its page" if self._is_hub else "check its credentials"
            raise DownloadError(f"{url} is not given to you ({code}): {how}")
        if code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise DownloadError(f"{url} has fewer bytes than were fetched of it before: delete them, and start again")
        if code >= 500 or code == httpx.codes.TOO_MANY_REQUESTS:
            raise InterruptedReadError(f"{url} answers {code}: try again later, or {_COPY}")
        if not reply.is_success:
            raise DownloadError(f"{url} answers {code}: check the address")
        if (encoding := reply.headers.get("content-encoding", "identity")) != "identity":
            raise DownloadError(f"{url} answers in the encoding {encoding[:40]!r}, which was not asked for")

    def _check_host(self, request: httpx.Request) -> None:
        host, own = request.url.host, self._base.host
        allowed = host == own or host.endswith((f".{own}", *(_CONTENT_HOSTS if self._is_hub else ())))
        if not allowed or (self._base.scheme == "https" and request.url.scheme != "https"):
            raise DownloadError(
                f"{self._base} leads to {request.url.scheme}://{host}, which is not its host: give that address itself"
                " if you trust it"
            )

    @contextlib.contextmanager
    def _explain(self, name: str) -> Iterator[None]:
        try:
            yield
        except (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise DownloadError(f"{self._name(name)} cannot be read ({error}): check the address") from None
        except httpx.HTTPError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InterruptedReadError(
                f"{self._name(name)} cannot be reached ({reason}): check the network, and run the same command again to"
                f" go on from there, or {_COPY}"
            ) from None


class _FsspecFolder:
    def __init__(self, url: str) -> None:
        self._url = url
        self._system, root = open_file_system(url)
        self._root = root.rstrip("/")

    def describe(self, name: str) -> RemoteFile:
        with self._explain(name):
            return RemoteFile(self._system.info(f"{self._root}/{name}").get("size"), "")

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        path = f"{self._root}/{name}"
        size = self.describe(name).bytes
        while size is None or begin < size:
            with self._explain(name):
                data: bytes = self._system.cat_file(path, start=begin, end=begin + _RANGE)
            if not data:
                return
            yield data
            begin += len(data)

    @contextlib.contextmanager
    def _explain(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingFileError(f"{self._url}/{name} does not exist: check the address") from None
        except Exception as error:  # noqa: BLE001 - the libraries of file systems share no type of error
            # Every file system has errors of its own; those of credentials differ in their names alone.
            kind = " ".join(found.__name__ for found in type(error).__mro__)
            why = f"{self._url}/{name} cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            if isinstance(error, PermissionError) or "Credential" in kind:
                raise DownloadError(f"{why}: check the credentials for this address") from None
            raise InterruptedReadError(f"{why}: check the endpoint and the network, or {_COPY}") from None


def _find_on_hub(url: str) -> str:
    """The URL of a folder hf://[datasets/]OWNER/NAME[@REVISION][/FOLDER] on the Hub, or on HF_ENDPOINT."""
    kind, rest = ("datasets/", url[14:]) if url.startswith("hf://datasets/") else ("", url[5:])
    owner, _, rest = rest.partition("/")
    name, _, path = rest.partition("/")
    name, _, revision = name.partition("@")
    if not owner or not name:
        raise DownloadError(f"{url} is no address on the Hub: give hf://datasets/OWNER/NAME or hf://OWNER/NAME")
    hub = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    return f"{hub}/{kind}{owner}/{name}/resolve/{quote(revision or 'main', safe='')}/{path}".rstrip("/")
