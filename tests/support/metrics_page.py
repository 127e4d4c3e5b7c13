"""The script that makes docs/reference/metrics.md, for tests."""

from __future__ import annotations

from metrics_doc import DOCUMENT, collected, names, others, section

__all__ = ["DOCUMENT", "assert_current", "collected", "names", "others"]


def assert_current(service: str) -> None:
    """Fail unless the page says what this environment's service registers: names, types, labels, meanings."""
    page = DOCUMENT.read_text(encoding="utf-8")
    assert section(service, collected(service)) in page, "docs/reference/metrics.md: run 'make reference' and commit"
