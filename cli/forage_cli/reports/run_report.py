"""The end of a run: summary.json, the learning curve as PNG, and one self-contained HTML page."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from forage_cli.reports import figures, page
from forage_cli.runs.ledger import GroupCounts
from forage_records.run_folder import Row, RunFolder
from forage_records.statistics import mean_known
from forage_runtime.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Summary = dict[str, float | int | str | None]
EXAMPLES = 3
CURVE = "Learning curve: exact match of sampled and of greedy answers, rates and rewards over optimizer steps"
_RATES = (
    ("em_mean", "EM, sampled (training questions)", figures.GREEN),
    ("search_rate", "search rate, sampled", figures.BLUE),
    ("format_rate", "format rate, sampled", figures.AMBER),
)
_REWARD, _COMPONENT = "reward_mean", "reward/"


def summarise(
    run: RunFolder, settings: Settings, counts: GroupCounts, restarts: Mapping[str, int], minutes: float
) -> Summary:
    """Compute the metrics of a run; `logprob_diff_mean` covers steps with tokens of the trainer's own version.

    `tokens_digest` is of the tokens of all steps, `weights_digest` of the last policy: equal in runs that are equal.
    """
    steps = run.read_steps()
    before, after = run.read_validation("before") or {}, run.read_validation("after") or {}
    ems = before.get("em"), after.get("em")
    gain = None if ems[0] is None or ems[1] is None else ems[1] - ems[0]
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
        "logprob_diff_mean": mean_known(row.get("logprob_diff_mean") for row in steps),
        "restarts": sum(restarts.values()),
        **{f"restarts_{name}": count for name, count in restarts.items()},
    }


def write_report(run: RunFolder, summary: Summary) -> Path:
    """Write summary.json, curve.png and report.html into the run's folder; returns the page."""
    (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    curve = draw_curve(run)
    curve.savefig(run.path / "curve.png", dpi=130, facecolor="white")
    report = run.path / "report.html"
    svg = figures.render_svg(curve, CURVE)
    seed, caption = int(summary["seed"] or 0), _describe_curve(run)
    pairs, chosen = _pair_examples(run, seed), describe_examples(run, seed)
    text = page.render("run.html", summary=summary, curve=svg, caption=caption, pairs=pairs, chosen=chosen)
    report.write_text(text, encoding="utf-8")
    return report


@figures.apply_style()
def draw_curve(run: RunFolder) -> Figure:
    """Draw what the steps know: exact match and rates, rewards where there is no exact match, and KL.

    The exact match of greedy answers is drawn for every validation of held-out questions. What is unknown is a gap.
    """
    from matplotlib import pyplot

    steps = run.read_steps()
    x = [row["step"] for row in steps]
    rates = [rate for rate in _RATES if _is_known(steps, rate[0])]
    rewards, greedy = _list_rewards(steps), run.read_greedy_scores()
    parts = [("rate", 3)] if rates or greedy or not rewards else []
    parts += [("reward", 3 if not parts else 2)] if rewards else []
    parts += [("KL", 1)] if _is_known(steps, "kl_ref") else []
    figure: Figure
    height = 1.4 + 1.05 * sum(size for _, size in parts)
    figure, grid = pyplot.subplots(
        len(parts), 1, figsize=(9, height), height_ratios=[n for _, n in parts], sharex=True, squeeze=False
    )
    for (name, _), axes in zip(parts, grid[:, 0], strict=True):
        axes.set_ylabel(name)
        if name == "KL":
            axes.plot(x, _read_values(steps, "kl_ref"), color=figures.PURPLE)
            continue
        drawn = rates if name == "rate" else rewards
        for key, label, colour in drawn:
            values = _read_values(steps, key)
            axes.plot(x, values, color=colour, alpha=0.25, linewidth=1)
            axes.plot(x, _smooth(values), color=colour, label=label)
        if name == "rate":
            _draw_greedy(axes, greedy)
            axes.set_ylim(-0.02, 1.05)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)
    grid[-1, 0].set_xlabel("optimizer step")
    return figure


def select_examples(run: RunFolder, label: str, seed: int, count: int = EXAMPLES) -> list[Row]:
    """Select some questions at random, the same ones before and after, right or wrong.

    Args:
        seed: of the run: the same run shows the same questions.
    """
    questions = _list_comparable(run)
    chosen = random.Random(seed).sample(questions, min(count, len(questions)))
    rows = {row["question"]: row for row in run.read_trajectories(label)}
    return [rows[question] for question in chosen if question in rows]


def describe_examples(run: RunFolder, seed: int, count: int = EXAMPLES) -> str:
    """Say how `select_examples` has chosen."""
    of = len(_list_comparable(run))
    return f"{min(count, of)} of {of} held-out questions, chosen at random by the run's seed {seed}"


def _list_comparable(run: RunFolder) -> list[str]:
    """List the held-out questions that were asked before and after, or at either end where there is only one."""
    before, after = ({row["question"] for row in run.read_trajectories(label)} for label in ("before", "after"))
    return sorted((before & after) or after or before)


def _list_rewards(steps: Sequence[Row]) -> list[tuple[str, str, str]]:
    """List the rewards to draw: (metric, label, colour); none where the exact match of sampled answers is known."""
    if _is_known(steps, "em_mean") or not _is_known(steps, _REWARD):
        return []
    parts = sorted({name for row in steps for name in row if name.startswith(_COMPONENT)})
    shown = [(name, f"of it {name.removeprefix(_COMPONENT)}") for name in parts[: len(figures.SERIES) - 1]]
    labels = [(_REWARD, "mean reward, sampled (training questions)"), *(shown if len(parts) > 1 else ())]
    return [(name, label, colour) for (name, label), colour in zip(labels, figures.SERIES, strict=False)]


def _draw_greedy(axes: Axes, greedy: Sequence[tuple[int, float]]) -> None:
    if not greedy:
        return
    axes.plot(*zip(*greedy, strict=True), "D--", color=figures.INK, label="EM, greedy (held-out questions)")
    for place, (step, em) in enumerate(greedy):
        if place in (0, len(greedy) - 1):
            axes.annotate(f"{em:.2f}", (step, em), textcoords="offset points", xytext=(0, 8), ha="center")


def _describe_curve(run: RunFolder) -> str:
    """Describe what `draw_curve` has drawn, and what is missing."""
    steps, greedy = run.read_steps(), run.read_greedy_scores()
    sentences = [
        "Thin lines are single steps, thick ones their moving average; both are of answers that were sampled to train "
        "on. A gap is a value that is not known."
    ]
    if greedy:
        sentences.append("Diamonds: exact match of greedy answers to held-out questions, for every validation.")
    if not _is_known(steps, "em_mean"):
        sentences.append("The exact match of sampled answers is not known in this run.")
    if _is_known(steps, "kl_ref"):
        sentences.append("Below: KL divergence from the reference policy.")
    return " ".join(sentences)


def _is_known(steps: Sequence[Row], name: str) -> bool:
    return any(row.get(name) is not None for row in steps)


def _read_values(steps: Sequence[Row], name: str) -> list[float]:
    """Read a metric of every step, NaN where it is unknown: a gap in the line."""
    return [math.nan if row.get(name) is None else float(row[name]) for row in steps]


def _smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Compute a moving average; a gap stays one, and the average goes on behind it."""
    out, last = [], math.nan
    for value in values:
        last = value if math.isnan(last) else last if math.isnan(value) else weight * last + (1 - weight) * value
        out.append(math.nan if math.isnan(value) else last)
    return out


def _pair_examples(run: RunFolder, seed: int) -> list[Row]:
    """Pair the examples by question."""
    found: dict[str, Row] = {}
    for label in ("before", "after"):
        for row in select_examples(run, label, seed):
            pair = found.setdefault(row["question"], {"targets": row.get("targets") or ["–"], "sides": []})
            pair["sides"].append((label, row))
    return [{"question": question, **pair} for question, pair in found.items()]
