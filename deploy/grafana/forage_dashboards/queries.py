"""PromQL of metrics that belong together, narrowed to what the dashboard's variables choose."""

from __future__ import annotations

from dataclasses import dataclass

RATE = "$__rate_interval"
"""Grafana's own: long enough for a rate, whatever the scrape interval is."""


@dataclass(frozen=True)
class Scope:
    """Which series a dashboard is about. matchers: of every metric that it names."""

    matchers: str

    def series(self, metric: str, where: str = "") -> str:
        """The metric's series; where: more matchers."""
        return f"{metric}{{{', '.join(filter(None, (self.matchers, where)))}}}"

    def gauge(self, metric: str, by: str = "", where: str = "", how: str = "max") -> str:
        """A gauge over all that show it, or by a label."""
        return f"{_over(how, by)}({self.series(metric, where)})"

    def rate(self, metric: str, by: str = "", where: str = "") -> str:
        """How much of a counter there is a second."""
        return f"{_over('sum', by)}(rate({self.series(metric, where)}[{RATE}]))"

    def grown(self, metric: str, by: str = "", where: str = "") -> str:
        """How much a counter has grown in the time that is shown."""
        return f"{_over('sum', by)}(increase({self.series(metric, where)}[$__range]))"

    def quantile(self, q: float, metric: str, by: str = "", where: str = "") -> str:
        """Of a histogram."""
        labels = ", ".join(filter(None, ("le", by)))
        return f"histogram_quantile({q}, {self.rate(f'{metric}_bucket', labels, where)})"

    def mean(self, metric: str, by: str = "", where: str = "") -> str:
        """Of a histogram."""
        return f"{self.rate(f'{metric}_sum', by, where)} / ({self.rate(f'{metric}_count', by, where)} > 0)"


def share(part: str, whole: str) -> str:
    """Part of whole; 0 where there is nothing to share.

    A part that is chosen by a label's value may not be there before it happens: give it ` or vector(0)`.
    """
    return f"({part}) / (({whole}) > 0) or vector(0)"


def _over(how: str, by: str) -> str:
    return f"{how} by ({by}) " if by else how


RELEASE = Scope('namespace=~"$namespace"')
"""One release of the chart, or all of compose, where nothing has a namespace."""

INSTANCE = Scope('namespace=~"$namespace", instance=~"$instance"')
"""Pods of one service."""
