"""Builds dashboards with the same variables, links, colours and sizes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.models import common as styles
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as formats
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode

TAG = "forage"
TRIPLE, HALF, WIDE = 8, 12, 24
"""Widths of panels, of 24 columns."""

GREEN, YELLOW, RED, NEUTRAL = "green", "yellow", "red", "text"
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_STAT_WIDTH, _STAT_HEIGHT, _HEIGHT = 4, 4, 8

Panel: TypeAlias = stat.Panel | timeseries.Panel | heatmap.Panel


class Query(NamedTuple):
    """A PromQL expression and the legend of its series: `{{label}}` stands for a label's value."""

    expr: str
    legend: str = ""


class Step(NamedTuple):
    """The colour of values above a threshold."""

    above: float
    colour: str


class DashboardBuilder:
    """Collects the panels of a dashboard, which are placed from left to right in their order.

    Every panel has a title, a description of its values and of their normal range, and a Grafana unit.
    """

    def __init__(self, name: str, title: str, description: str, job: str = "") -> None:
        """
        Args:
            name: the name of its file; the uid is `forage-<name>`, which must not change.
            job: the job whose instances can be selected; empty where the dashboard covers several services.
        """
        self._dashboard = (
            grafana.Dashboard(f"Forage / {title}")
            .uid(f"forage-{name}")
            .description(description)
            .tags([TAG])
            .timezone("browser")
            .refresh("30s")
            .time("now-3h", "now")
            .readonly()
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(
                grafana.DashboardLink("Forage")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags([TAG])
                .as_dropdown(False)
                .include_vars(True)
                .keep_time(True)
            )
            .with_variable(grafana.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
            .with_variable(_build_variable("namespace", "label_values(up, namespace)"))
            .annotation(
                grafana.AnnotationQuery()
                .name("Alerts")
                .enable(True)
                .icon_color(RED)
                .datasource(_SOURCE)
                .expr('ALERTS{alertname=~"Forage.*", alertstate="firing", namespace=~"$namespace"}')
            )
        )
        if job:
            query = f'label_values(up{{job="{job}", namespace=~"$namespace"}}, instance)'
            self._dashboard.with_variable(_build_variable("instance", query))
        self._panels = 0

    def add_row(self, title: str) -> None:
        """Start a row; the panels that follow belong to it."""
        self._panels += 1
        self._dashboard.with_row(grafana.Row(title).id(self._panels))

    def add_stat(self, title: str, description: str, unit: str, query: str, *steps: Step, base: str = GREEN) -> None:
        """Add the current value with its recent history. base: the colour below the first step."""
        panel = (
            stat.Panel()
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .graph_mode(styles.BigValueGraphMode.AREA)
            .color_mode(styles.BigValueColorMode.VALUE)
            .thresholds(_build_thresholds(steps, base))
        )
        self._add(panel, title, description, unit, [Query(query)], _STAT_WIDTH, _STAT_HEIGHT)

    def add_label(self, title: str, description: str, query: str, label: str) -> None:
        """Add the value of a label, for info metrics."""
        panel = (
            stat.Panel()
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .graph_mode(styles.BigValueGraphMode.NONE)
            .color_mode(styles.BigValueColorMode.NONE)
            .text_mode(styles.BigValueTextMode.NAME)
        )
        self._add(panel, title, description, "none", [Query(query, f"{{{{{label}}}}}")], _STAT_WIDTH, _STAT_HEIGHT)

    def add_timeseries(
        self,
        title: str,
        description: str,
        unit: str,
        *queries: Query,
        steps: tuple[Step, ...] = (),
        width: int = TRIPLE,
        stacked: bool = False,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> None:
        """Add metrics over time. steps: drawn as dashed lines; minimum, maximum: of the axis."""
        panel = (
            timeseries.Panel()
            .line_width(1.5)
            .fill_opacity(40 if stacked else 6)
            .show_points(styles.VisibilityMode.AUTO)
            .span_nulls(True)
            .legend(
                common.VizLegendOptions()
                .display_mode(styles.LegendDisplayMode.TABLE)
                .placement(styles.LegendPlacement.BOTTOM)
                .show_legend(True)
                .calcs(["lastNotNull", "max"])
            )
            .tooltip(common.VizTooltipOptions().mode(styles.TooltipDisplayMode.MULTI).sort(styles.SortOrder.DESCENDING))
        )
        if stacked:
            panel.stacking(common.StackingConfig().mode(styles.StackingMode.NORMAL))
        if steps:
            panel.thresholds(_build_thresholds(steps, GREEN)).thresholds_style(
                common.GraphThresholdsStyleConfig().mode(styles.GraphThresholdsStyleMode.DASHED)
            )
        if minimum is not None:
            panel.min(minimum)
        if maximum is not None:
            panel.max(maximum)
        self._add(panel, title, description, unit, list(queries), width, _HEIGHT)

    def add_heatmap(self, title: str, description: str, unit: str, buckets: str, width: int = TRIPLE) -> None:
        """Add a histogram over time. buckets: the rate of each bucket, by `le`."""
        panel = (
            heatmap.Panel()
            .calculate(False)
            .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(32))
            .y_axis(heatmap.YAxisConfig().unit(unit))
            .hide_from(common.HideSeriesConfig().legend(False).tooltip(False).viz(False))
            .show_legend()
        )
        self._add(panel, title, description, unit, [Query(buckets, "{{le}}")], width, _HEIGHT, heatmap_format=True)

    def build(self) -> models.Dashboard:
        """Build the SDK's model of the dashboard."""
        return self._dashboard.build()

    def _add(
        self,
        panel: Panel,
        title: str,
        description: str,
        unit: str,
        queries: list[Query],
        width: int,
        height: int,
        heatmap_format: bool = False,
    ) -> None:
        self._panels += 1
        panel.id(self._panels).title(title).description(description).unit(unit).datasource(_SOURCE)
        panel.span(width).height(height)
        for index, query in enumerate(queries):
            target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend or title)
            target.ref_id(chr(ord("A") + index)).datasource(_SOURCE).range()
            panel.with_target(target.format(formats.PromQueryFormat.HEATMAP) if heatmap_format else target)
        self._dashboard.with_panel(panel)


def _build_variable(name: str, query: str) -> grafana.QueryVariable:
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        grafana.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )


def _build_thresholds(steps: tuple[Step, ...], base: str) -> grafana.ThresholdsConfig:
    thresholds = [
        models.Threshold(value=None, color=base),
        *(models.Threshold(step.above, step.colour) for step in steps),
    ]
    return grafana.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)
