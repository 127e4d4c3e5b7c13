"""docs/reference/metrics.md: metrics that every service has, and those of Redis and Ray."""

from __future__ import annotations

from metrics_page import DOCUMENT, assert_current, read_series_names, render_external_sections


def test_the_reference_page_of_metrics_is_current() -> None:
    assert_current("common")
    assert render_external_sections() in DOCUMENT.read_text(encoding="utf-8")


def test_histograms_are_listed_by_their_series() -> None:
    assert {"forage_trainer_step", "forage_reward_score_bucket", "redis_up"} <= read_series_names()
    assert "forage_reward_score" not in read_series_names()
