"""Which addresses of messages may be read: those below folders and URLs that the settings name.

An address is compared as text, segment by segment, and never decoded: what two programs could read differently is
refused. Of folders of this machine the resolved paths are compared, too, so that no link leads outside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forage_runtime.errors import ForageError

_LONGEST = 2048
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)
_LOCAL = "file://"
_PLAIN = re.compile(r"[A-Za-z0-9_=+,.-]+", re.ASCII)
_DOTS = ("", ".", "..")


class AddressError(ForageError):
    """An address is malformed, or outside what is allowed."""


@dataclass(frozen=True)
class _Place:
    """A parsed address.

    Attributes:
        chain: fsspec's file systems in front of it, as "simplecache"; most have none.
        scheme: such as "s3://"; empty: a folder of this machine.
        segments: of the rest, between slashes.
    """

    chain: str
    scheme: str
    segments: tuple[str, ...]

    @property
    def path(self) -> str:
        return "/" + "/".join(self.segments)


class AllowedAddresses:
    """Addresses below which everything may be read.

    Args:
        allowed: folders of this machine, which may be relative, and URLs.
    """

    def __init__(self, allowed: Iterable[str | Path]) -> None:
        self._places = [_parse_allowed(str(one)) for one in allowed]

    def require(self, address: str, names: Iterable[str] = ()) -> None:
        """Return if an address is allowed, and the files of these names in it are not links to elsewhere.

        Raises:
            AddressError: it is malformed or outside; the sentence names the settings that allow more.
        """
        place = _parse(address)
        for root in self._places:
            if _is_below(place, root):
                if not place.scheme:
                    _require_no_way_out(address, place, root, names)
                return
        raise AddressError(
            f"{_shorten(address)} is not allowed: it is neither in the run's folder nor below trainer.publish.uri or "
            "one of security.allowed_addresses"
        )


def _parse(address: str) -> _Place:
    if not address or len(address) > _LONGEST or not address.isprintable() or "\\" in address:
        raise AddressError(f"{_shorten(address)} is no address: expected an absolute path, or a URL")
    chain, _, last = address.rpartition("::")
    if last.startswith(_LOCAL):
        last = last.removeprefix(_LOCAL)
    elif scheme := _SCHEME.match(last):
        segments = tuple(last[scheme.end() :].removesuffix("/").split("/"))
        return _Place(chain, scheme[0], segments)
    if not last.startswith("/") or "://" in last:  # fsspec would take what is before it as a scheme
        raise AddressError(f"{_shorten(address)} is no address: expected an absolute path, or a URL")
    segments = tuple(last.removesuffix("/")[1:].split("/"))
    if any(segment in _DOTS for segment in segments):
        raise AddressError(f"{_shorten(address)} is no address: it has an empty part, '.' or '..' in it")
    return _Place(chain, "", segments)


def _parse_allowed(text: str) -> _Place:
    chain, _, last = text.rpartition("::")
    if (scheme := _SCHEME.match(last)) and scheme[0] != _LOCAL:
        return _Place(chain, scheme[0], tuple(last[scheme.end() :].rstrip("/").split("/")))
    path = os.path.abspath(last.removeprefix(_LOCAL))
    return _Place(chain, "", tuple(path.strip("/").split("/")))


def _is_below(place: _Place, root: _Place) -> bool:
    if (place.chain, place.scheme) != (root.chain, root.scheme):
        return False
    if not place.scheme:
        return _is_in(place.path, root.path)
    rest = place.segments[len(root.segments) :]
    return place.segments[: len(root.segments)] == root.segments and all(
        _PLAIN.fullmatch(segment) and segment not in _DOTS for segment in rest
    )


def _is_in(path: str, root: str) -> bool:
    """Whether a path is below another once all links are followed."""
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    return real == real_root or real.startswith(real_root.rstrip("/") + "/")


def _require_no_way_out(address: str, place: _Place, root: _Place, names: Iterable[str]) -> None:
    """Return if no file is a link out of the root. The links in a folder that the settings name are its owner's."""
    if os.path.realpath(place.path) == os.path.realpath(root.path):
        return
    for name in names:
        if not _is_in(os.path.join(place.path, name), root.path):
            raise AddressError(f"{_shorten(address)}/{_shorten(name)} is not allowed: it is a link to elsewhere")


def _shorten(text: str) -> str:
    return ascii(text if len(text) <= 200 else f"{text[:200]}…")
