"""Labels of metrics from data: bounded in number and length, and inert on the page of metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forage_runtime.telemetry.label_names import MAX_CHARS, OTHER, LabelNames


def test_the_first_names_keep_their_name_for_good() -> None:
    names = LabelNames(2)
    assert [names.name(value) for value in ("nq", "b", "c", "nq", "b", "d")] == ["nq", "b", OTHER, "nq", "b", OTHER]


def test_a_long_name_is_not_kept_and_takes_no_place() -> None:
    names = LabelNames(1)
    assert names.name("x" * (MAX_CHARS + 1)) == OTHER
    assert names.name("x" * MAX_CHARS) == "x" * MAX_CHARS


def test_ten_thousand_names_are_as_many_series_as_the_limit_and_one() -> None:
    names = LabelNames(64)
    assert len({names.name(str(number)) for number in range(10_000)}) == 65


def test_no_name_writes_a_sample_of_its_own() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "help", ["source"], registry=registry)
    hostile = ['a"} 1\nforged{x="', "\nforged 1\n", "\\", '\\"', "# HELP forged x\n", "\r\nforged 1", "{}", ""]
    names = LabelNames()
    for value in hostile:
        gauge.labels(names.name(value)).set(1)
    page = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(page))
    assert [family.name for family in families] == ["g"]
    assert sorted(sample.labels["source"] for sample in families[0].samples) == sorted(hostile)
