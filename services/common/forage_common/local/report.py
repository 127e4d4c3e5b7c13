"""The end of a run: summary.json, the learning curve as PNG, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import json
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from forage_common.local.accounts import Accounts
from forage_common.local.runs import Row, RunFolder
from forage_common.settings import Settings

Summary = dict[str, float | int | str | None]
EXAMPLES = 3


def summarise(
    run: RunFolder, settings: Settings, accounts: Accounts, restarts: Mapping[str, int], minutes: float
) -> Summary:
    """The figures of a run; `logprob_diff_mean` is over steps that had tokens of the trainer's own version."""
    steps = run.steps()
    before, after = run.validation("before") or {}, run.validation("after") or {}
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
        **accounts.as_dict(),
        "logprob_diff_mean": sum(differences) / len(differences) if differences else None,
        "restarts": sum(restarts.values()),
        **{f"restarts_{name}": count for name, count in restarts.items()},
    }


def write(run: RunFolder, summary: Summary) -> Path:
    """Write summary.json, curve.png and report.html into the run's folder; returns the page."""
    (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    curve = draw_curve(run, run.path / "curve.png")
    page = run.path / "report.html"
    page.write_text(_page(run, summary, curve), encoding="utf-8")
    return page


def draw_curve(run: RunFolder, file: Path) -> Path:
    """EM, search rate and format rate over steps, with the greedy test EM at both ends; KL and staleness below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = run.steps()
    x = [row["step"] for row in steps]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 6.5), height_ratios=[3, 1], sharex=True)
    for key, label, color in (
        ("em_mean", "EM of sampled answers (train)", "tab:green"),
        ("search_rate", "search rate", "tab:blue"),
        ("format_rate", "format rate", "tab:orange"),
    ):
        values = [row.get(key) or 0.0 for row in steps]
        top.plot(x, values, color=color, alpha=0.25, linewidth=1)
        top.plot(x, _smooth(values), color=color, label=label, linewidth=2)
    ends = [(0, run.validation("before")), (x[-1] if x else 0, run.validation("after"))]
    points = [(step, found["em"]) for step, found in ends if found]
    if points:
        top.plot(*zip(*points, strict=True), "D--", color="black", label="greedy EM, held-out test entities")
        for step, em in points:
            top.annotate(f"{em:.2f}", (step, em), textcoords="offset points", xytext=(0, 8), ha="center")
    top.set_ylim(-0.02, 1.05)
    top.set_ylabel("rate")
    top.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=4, frameon=False, fontsize=8)
    bottom.plot(x, [row.get("kl_ref") or 0.0 for row in steps], color="tab:purple", label="KL to the reference")
    bottom.set_ylabel("KL")
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


def examples(run: RunFolder, label: str, count: int = EXAMPLES) -> list[Row]:
    """The same questions before and after: those that training turned from wrong to right come first."""
    before = {row["question"]: row for row in run.trajectories("before")}
    after = {row["question"]: row for row in run.trajectories("after")}
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


def _page(run: RunFolder, summary: Summary, curve: Path) -> str:
    picture = base64.b64encode(curve.read_bytes()).decode()
    figures = "".join(
        f"<div><b>{_figure(summary.get(key))}</b>{label}</div>"
        for key, label in (
            ("em_before", "greedy test EM before"),
            ("em_after", "greedy test EM after"),
            ("steps", "optimizer steps"),
            ("minutes", "minutes"),
            ("groups_lost", "groups lost"),
            ("groups_duplicated", "groups trained on twice"),
        )
    )
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{_figure(v)}</td></tr>" for k, v in summary.items())
    shown = ""
    for label in ("before", "after"):
        shown += f"<h2>{label.capitalize()} training</h2>" + "".join(map(_trajectory, examples(run, label)))
    template = resources.files("forage_common.local").joinpath("report.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        run=html.escape(str(summary["run"])),
        seed=summary["seed"],
        figures=figures,
        picture=picture,
        trajectories=shown,
        rows=rows,
    )


def _trajectory(row: Row) -> str:
    right = float(row.get("em") or 0) > 0
    spans = "".join(
        f'<span class="{html.escape(span["role"])}">{html.escape(span["text"])}</span>'
        for span in row["spans"]
        if span["role"] != "prompt"
    )
    accepted = html.escape(" | ".join(row.get("targets") or []))
    return (
        f'<div class="t{" right" if right else ""}"><span class="q">{html.escape(row["question"])}</span>\n{spans}\n'
        f"{'right' if right else 'wrong'} · accepted: {accepted}</div>"
    )


def _figure(value: float | int | str | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
    return html.escape(str(value))
