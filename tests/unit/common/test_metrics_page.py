"""docs/reference/metrics.md: what every service shows, and what is not Forage's."""

from __future__ import annotations

from metrics_page import DOCUMENT, assert_current, names, others


def test_the_page_of_metrics_is_current() -> None:
    assert_current("common")
    assert others() in DOCUMENT.read_text(encoding="utf-8")


def test_histograms_are_known_by_their_series() -> None:
    assert {"forage_trainer_step", "forage_reward_score_bucket", "redis_up"} <= names()
    assert "forage_reward_score" not in names()
