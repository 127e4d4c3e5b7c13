"""Texts and settings without credentials: for errors, logs, trackers, reports and pages."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

# In a URL of Redis everything before the last @ is the login, even where a password with / or # was not encoded. In
# others such a password follows a colon, and does not look like a port. The bounds keep long texts cheap.
_LOGIN = re.compile(
    r"((?:redis|valkey)[a-z+]{0,20}://)\S{0,4096}@|([a-z][a-z0-9+.-]{0,20}://)"
    r"(?:[^\s/?#]{0,4096}|[^\s/?#@:\[]{0,256}:(?!\d{1,5}(?:[/?#]|$)|//)\S{0,256})@",
    re.IGNORECASE,
)
_PARAMETER = re.compile(r"([?&;#])([^\s=&;#?]+)=([^\s&;#]*)")
# A quotation mark ends it, unless it is one of a password: what follows leads to an @.
_URL = re.compile(r"[a-z][a-z0-9+.-]{0,20}://(?:[^\s<>\"'`]|[<>\"'`](?=[^\s,:;)}\]<>\"'`]\S{0,256}@))+", re.IGNORECASE)
_HEADER = re.compile(
    r"\b((?:(?:proxy-)?authorization|(?:x-(?:goog-)?)?api-key)\b[\"']?\s*[:=,]\s*[\[(]?(?:b(?=[\"']))?[\"']?"
    r"(?:(?:bearer|basic|token|apikey|digest|negotiate)\s+)?)[^\s\"',]+",
    re.IGNORECASE,
)

_SECRET_PARAMETER = re.compile(
    r"key|token|secret|passw|pwd|auth|credential|signature|^x-(amz|goog|ms)-|^(sig|sas|accessid|googleaccessid)$",
    re.IGNORECASE,
)
_SECRET_SETTING = re.compile(
    r"(^|[_-])(password|passwd|secret|token|credentials?|api_?key|(access|secret)_?key)$", re.I
)
_FILE = re.compile(r"(file|path|env)$", re.IGNORECASE)


def redact_url(url: str) -> str:
    """Replace the login of a URL, and the query parameters that grant access (token, key, sig, X-Amz-…), by `***`."""
    return _PARAMETER.sub(_hide_parameter, _LOGIN.sub(rf"\1\2{HIDDEN}@", url))


def redact_text(text: str) -> str:
    """Redact every URL of a text, and the value of every authorization header."""
    return _HEADER.sub(rf"\1{HIDDEN}", _URL.sub(lambda found: redact_url(found.group()), text))


def redact_settings(tree: Any) -> Any:
    """Redact a tree of plain values, as `model_dump(mode="json")` gives it; the tree itself stays as it is.

    Every string is redacted as a URL, and values whose name says that they are a password, a token or a key are
    hidden whole. Names of files stay: they are no secret.
    """
    return _redact_value("", tree)


def _redact_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redact_value(str(key), part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(name, part) for part in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if _SECRET_SETTING.search(name) else redact_url(value)


def _hide_parameter(found: re.Match[str]) -> str:
    mark, name, _ = found.groups()
    plain = unquote(name)
    is_secret = _SECRET_PARAMETER.search(plain) and not _FILE.search(plain)
    return f"{mark}{name}={HIDDEN}" if is_secret else found.group()
