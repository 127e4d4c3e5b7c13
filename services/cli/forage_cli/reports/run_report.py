"""The end of a run: summary.json, the learning curve as PNG, and one self-contained HTML page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from forage_cli.reports import figures, page
from forage_cli.runs.folder import Row, RunFolder
from forage_cli.runs.ledger import GroupCounts
from forage_common.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Summary = dict[str, float | int | str | None]
EXAMPLES = 3
CURVE = "Learning curve: exact match, search rate and format rate over optimizer steps"


def summarise(
    run: RunFolder, settings: Settings, counts: GroupCounts, restarts: Mapping[str, int], minutes: float
) -> Summary:
    """Compute the metrics of a run; `logprob_diff_mean` covers steps with tokens of the trainer's own version.

    `tokens_digest` is of the tokens of all steps, `weights_digest` of the last policy: equal in runs that are equal.
    """
    steps = run.read_steps()
    before, after = run.read_validation("before") or {}, run.read_validation("after") or {}
    differences = [row["logprob_diff_mean"] for row in steps if row.get("logprob_diff_mean") is not None]
    gain = after["em"] - before["em"] if before and after else None
    return {
        "run": settings.run.id,
        "seed": settings.run.seed,
        "em_before": before.get("em"),
        "em_after": after.get("em"),
        "em_gain": gain,
        "test_questions": after.get("count"),
        "steps": len(steps),
        "minutes": round(minutes, 2),
        **asdict(counts),
        "tokens_digest": hashlib.sha256("\n".join(str(row.get("tokens_digest")) for row in steps).encode()).hexdigest(),
        "weights_digest": steps[-1].get("weights_digest") if steps else None,
        "logprob_diff_mean": sum(differences) / len(differences) if differences else None,
        "restarts": sum(restarts.values()),
        **{f"restarts_{name}": count for name, count in restarts.items()},
    }


def write_report(run: RunFolder, summary: Summary) -> Path:
    """Write summary.json, curve.png and report.html into the run's folder; returns the page."""
    (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    curve = draw_curve(run)
    curve.savefig(run.path / "curve.png", dpi=130, facecolor="white")
    report = run.path / "report.html"
    svg = figures.render_svg(curve, CURVE)
    report.write_text(page.render("run.html", summary=summary, curve=svg, pairs=_pair_examples(run)), encoding="utf-8")
    return report


@figures.apply_style()
def draw_curve(run: RunFolder) -> Figure:
    """Draw EM, search rate and format rate over steps, with the greedy test EM at both ends, and KL below."""
    from matplotlib import pyplot

    steps = run.read_steps()
    x = [row["step"] for row in steps]
    figure: Figure
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 5.6), height_ratios=[3, 1], sharex=True)
    for key, label, color in (
        ("em_mean", "EM of sampled answers (train)", figures.GREEN),
        ("search_rate", "search rate", figures.BLUE),
        ("format_rate", "format rate", figures.AMBER),
    ):
        values = [row.get(key) or 0.0 for row in steps]
        top.plot(x, values, color=color, alpha=0.25, linewidth=1)
        top.plot(x, _smooth(values), color=color, label=label)
    ends = [(0, run.read_validation("before")), (x[-1] if x else 0, run.read_validation("after"))]
    points = [(step, found["em"]) for step, found in ends if found]
    if points:
        top.plot(*zip(*points, strict=True), "D--", color=figures.INK, label="greedy EM, held-out test entities")
        for step, em in points:
            top.annotate(f"{em:.2f}", (step, em), textcoords="offset points", xytext=(0, 8), ha="center")
    top.set_ylim(-0.02, 1.05)
    top.set_ylabel("rate")
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9)
    bottom.plot(x, [row.get("kl_ref") or 0.0 for row in steps], color=figures.PURPLE)
    bottom.set_ylabel("KL")
    bottom.set_xlabel("optimizer step")
    return figure


def select_examples(run: RunFolder, label: str, count: int = EXAMPLES) -> list[Row]:
    """Select the same questions before and after, first those that training changed from wrong to right."""
    before = {row["question"]: row for row in run.read_trajectories("before")}
    after = {row["question"]: row for row in run.read_trajectories("after")}
    both = [question for question in after if question in before] or list(after or before)

    def order(question: str) -> tuple[float, float, str]:
        was = float(before.get(question, {}).get("em") or 0)
        now = float(after.get(question, {}).get("em") or 0)
        return (was - now, -len(after.get(question, {}).get("spans", ())), question)

    rows = {"before": before, "after": after}.get(label, {})
    return [rows[question] for question in sorted(both, key=order)[:count] if question in rows]


def _smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * out[-1] + (1 - weight) * value)
    return out


def _pair_examples(run: RunFolder) -> list[Row]:
    """Pair the examples by question."""
    found: dict[str, Row] = {}
    for label in ("before", "after"):
        for row in select_examples(run, label):
            pair = found.setdefault(row["question"], {"targets": row.get("targets") or ["–"], "sides": []})
            pair["sides"].append((label, row))
    return [{"question": question, **pair} for question, pair in found.items()]
