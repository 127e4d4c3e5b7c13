"""PromQL expressions, restricted to the selection of the dashboard's variables."""

from __future__ import annotations

from dataclasses import dataclass

RATE = "$__rate_interval"
"""A variable of Grafana: an interval long enough for a rate at any scrape interval."""


@dataclass(frozen=True)
class Scope:
    """The series of a dashboard. matchers: label matchers of every metric."""

    matchers: str

    def select(self, metric: str, where: str = "") -> str:
        """Select the series of a metric; where: further matchers."""
        return f"{metric}{{{', '.join(filter(None, (self.matchers, where)))}}}"

    def aggregate(self, metric: str, by: str = "", where: str = "", how: str = "max") -> str:
        """Aggregate a gauge over all series, or by a label. how: the aggregation operator."""
        return f"{_aggregation(how, by)}({self.select(metric, where)})"

    def compute_rate(self, metric: str, by: str = "", where: str = "") -> str:
        """Compute the rate of a counter per second."""
        return f"{_aggregation('sum', by)}(rate({self.select(metric, where)}[{RATE}]))"

    def compute_increase(self, metric: str, by: str = "", where: str = "") -> str:
        """Compute the increase of a counter over the selected time range."""
        return f"{_aggregation('sum', by)}(increase({self.select(metric, where)}[$__range]))"

    def compute_quantile(self, q: float, metric: str, by: str = "", where: str = "") -> str:
        """Compute a quantile of a histogram."""
        labels = ", ".join(filter(None, ("le", by)))
        return f"histogram_quantile({q}, {self.compute_rate(f'{metric}_bucket', labels, where)})"

    def compute_mean(self, metric: str, by: str = "", where: str = "") -> str:
        """Compute the mean of a histogram."""
        return (
            f"{self.compute_rate(f'{metric}_sum', by, where)} / ({self.compute_rate(f'{metric}_count', by, where)} > 0)"
        )


def compute_ratio(part: str, whole: str) -> str:
    """Compute part / whole; 0 where the whole is 0.

    A part selected by the value of a label may have no series before its first event: append ` or vector(0)` to it.
    """
    return f"({part}) / (({whole}) > 0) or vector(0)"


def _aggregation(how: str, by: str) -> str:
    return f"{how} by ({by}) " if by else how


RELEASE = Scope('namespace=~"$namespace"')
"""One release of the chart, or all of docker compose, where series have no namespace."""

INSTANCE = Scope('namespace=~"$namespace", instance=~"$instance"')
"""The instances of one service."""
