"""Headers of every answer: what a browser may do with it."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # figures and tables place their parts by style attributes
        "img-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_PINNED_S = 365 * 24 * 3600
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def add_headers(headers: MutableHeaders, is_pinned: bool = False) -> None:
    """Add the headers; an answer that says nothing about caches is asked for again each time.

    Args:
        is_pinned: whether browsers should reach this host by TLS alone from now on.
    """
    headers.update(_HEADERS)
    if is_pinned:
        headers["Strict-Transport-Security"] = f"max-age={_PINNED_S}"
    headers.setdefault("Cache-Control", "no-cache")
