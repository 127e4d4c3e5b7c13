"""The report page of a probe: confidence curve with its band, heat map of all probes, and thoughts with marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forage_cli.probe.show import METRICS
from forage_cli.reports import figures, page
from forage_probe import metrics
from forage_probe.contexts import NothingToProbeError, find_thought
from forage_proto.v1.probe_pb2 import CotBoundary, Probed
from forage_proto.v1.trajectory_pb2 import Status, Trajectory
from forage_records.spans import Mark
from forage_runtime.settings import Settings
from forage_runtime.text.enums import name_value
from forage_runtime.text.token_texts import TokenTexts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 60
"""Largest number of trajectories whose text is on the page."""

_COLOURS = {"all": figures.BLUE, "correct": figures.GREEN, "incorrect": figures.RED}


def render_page(
    summary: Mapping[str, Any], probes: Sequence[Probed], trajectories: Iterable[Trajectory], settings: Settings
) -> str:
    """Render the whole document.

    Args:
        summary: the content of summary.json.
        trajectories: the probed ones, of which the first `SHOWN` probes are shown with their text.
    """
    judged = [probed for probed in probes if probed.status == Status.STATUS_OK]
    shown = {(probed.trajectory_id, probed.turn): probed for probed in judged[:SHOWN]}
    texts = TokenTexts(settings.model.path)
    thoughts = [
        thought
        for trajectory in trajectories
        for (name, _), probed in shown.items()
        if name == trajectory.id and (thought := _describe_thought(trajectory, probed, texts, settings))
    ]
    return page.render(
        "probe.html",
        "forage_cli.probe",
        summary=summary,
        curve=figures.render_svg(
            _draw_curve(summary), "Confidence over the share of the thought that is kept, with its 95 % band"
        )
        if judged
        else None,
        heat=figures.render_svg(_draw_heat_map(judged), "Confidence of every probe at every truncation")
        if judged
        else None,
        sets=[[label, *(one[key] for one in summary["sets"].values())] for key, label in METRICS.items()],
        rows=[_make_row(probed) for probed in judged],
        thoughts=thoughts,
        failures=[[p.trajectory_id, p.turn, p.status_detail] for p in probes if p.status != Status.STATUS_OK],
    )


@figures.apply_style()
def _draw_curve(summary: Mapping[str, Any]) -> Figure:
    from matplotlib import pyplot

    figure: Figure
    figure, axes = pyplot.subplots(figsize=(9, 4))
    points = summary["plan"]["points"]
    kept = [100 * place / points for place in range(points + 1)]
    for name, one in summary["sets"].items():
        low, high = zip(*one["intervals"], strict=True)
        axes.fill_between(kept, low, high, color=_COLOURS[name], alpha=0.15, linewidth=0)
        axes.plot(
            kept, one["confidence_at"], "o-", color=_COLOURS[name], markersize=4, label=f"{name} ({one['count']})"
        )
    axes.set(xlabel="% of the thought that is kept", ylabel="confidence", ylim=(-0.03, 1.03))
    axes.legend(loc="upper left")
    return figure


@figures.apply_style()
def _draw_heat_map(judged: Sequence[Probed]) -> Figure:
    """Draw the confidence of every probe, the most confident on top."""
    from matplotlib import pyplot

    rows = sorted((metrics.measure(probed).confidence for probed in judged), key=lambda row: (sum(row), row))
    points = len(rows[0]) - 1
    figure: Figure
    figure, axes = pyplot.subplots(figsize=(9, min(9.0, 1.4 + 0.16 * len(rows))))
    edges = [100 * (place - 0.5) / points for place in range(points + 2)]
    mesh = axes.pcolormesh(
        edges, range(len(rows) + 1), rows, cmap="cividis", vmin=0, vmax=1, rasterized=len(rows) > 300
    )
    axes.set(xlabel="% of the thought that is kept", ylabel="probes", yticks=[])
    axes.grid(visible=False)
    figure.colorbar(mesh, label="confidence")
    return figure


def _make_row(probed: Probed) -> list[Any]:
    found = metrics.measure(probed)
    return [
        probed.trajectory_id,
        probed.turn,
        "right" if probed.correct else "wrong",
        probed.cot_end - probed.cot_begin,
        found.confidence[0],
        found.confidence[-1],
        found.rho,
        found.overconfidence,
        found.aoc,
    ]


def _describe_thought(
    trajectory: Trajectory, probed: Probed, texts: TokenTexts, settings: Settings
) -> dict[str, Any] | None:
    """Collect the template's values of a probe: the text with a mark at every truncation."""
    try:
        thought = find_thought(trajectory, probed.turn, texts, settings.rollout)
    except NothingToProbeError:
        return None
    start = sum(len(span.text) for span in trajectory.spans[: thought.span]) + thought.offset
    found = metrics.measure(probed)
    marks = []
    for place, point in enumerate(probed.points):
        low, high = found.intervals[place]
        answer = metrics.most_frequent_answer(point)
        marks.append(
            Mark(
                at=start + sum(map(len, thought.texts[: point.kept])),
                label=f"{found.confidence[place]:.2f}",
                title=f"{point.kept} tokens kept: {point.correct} of {point.samples} right "
                f"(95 % {low:.2f} to {high:.2f}), most often {answer or 'no answer'}",
                strength=found.confidence[place],
            )
        )
    boundary = name_value(CotBoundary, probed.boundary).lower().replace("_", " ")
    return {
        "id": trajectory.id,
        "turn": probed.turn,
        "right": probed.correct,
        "targets": _describe_truth(trajectory),
        "spans": trajectory.spans,
        "marks": marks,
        "metrics": f"{thought.length} tokens, ended by {boundary}; ρ {page.format_number(found.rho)}, overconfidence "
        f"{page.format_number(found.overconfidence)}, area over the curve {page.format_number(found.aoc)}",
    }


def _describe_truth(trajectory: Trajectory) -> str:
    truth = trajectory.ground_truth
    if truth.HasField("countdown_target"):
        return f"{truth.countdown_target} from {', '.join(map(str, truth.countdown_numbers))}"
    return " | ".join(truth.targets)
