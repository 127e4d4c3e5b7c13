"""Functions of the script that generates docs/reference/metrics.md, for tests."""

from __future__ import annotations

from metrics_doc import DOCUMENT, collect_metrics, read_series_names, render_external_sections, render_section

__all__ = ["DOCUMENT", "assert_current", "collect_metrics", "read_series_names", "render_external_sections"]


def assert_current(service: str) -> None:
    """Assert that the page has the metrics of this environment's service with types, labels and meanings."""
    page = DOCUMENT.read_text(encoding="utf-8")
    assert render_section(service, collect_metrics(service)) in page, (
        "docs/reference/metrics.md: run 'make reference' and commit"
    )
