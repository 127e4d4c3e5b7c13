"""docs/reference/metrics.md and the metrics of the console."""

from __future__ import annotations

from metrics_page import assert_current


def test_the_reference_page_of_metrics_is_current() -> None:
    assert_current("console")
