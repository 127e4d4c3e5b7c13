"""The table of a chaos run, its projection to long steps, and the line of JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from chaos.arithmetic import PROJECTED_STEP_S, SHARES, average_over_kinds, compute_effective_time, find_percentile
from chaos.episode import Tally
from chaos.kinds import Strike
from chaos.transports import Ways

BACK_BARS_S = {"dispatcher": 3.0, "replica": 15.0, "engine-core": 15.0, "trainer": 20.0}
LEAST_EFFECTIVE = 0.90
FORMULA = (
    "cost of a fault = outage + work done again; outage = time to the next fault - steps taken x undisturbed step -"
    " steps taken again x undisturbed step;\nwork done again, in steps: (save_freq - 1)/2 + 1/2 + 0.7 (until a"
    " checkpoint is durable) if a trainer began anew, save_freq more if\nthe newest checkpoint was damaged, 1/2 if an"
    " engine or a dispatcher began anew; effective time = step / (step + share of steps hit x mean cost of the kinds)"
)


@dataclass(frozen=True)
class Report:
    """Everything that a chaos run says at its end."""

    table: str
    result: dict[str, Any]
    failures: list[str]


def summarize(tally: Tally, seed: int, save_freq: int) -> Report:
    """
    Args:
        save_freq: interval of checkpoints of the recipe that the costs are projected to.
    """
    strikes, outcomes = tally.strikes, tally.outcomes
    costs = _share_costs(tally, lambda cost: cost.lost_s)
    projected = _share_costs(tally, lambda cost: cost.project_s(tally.step_s, save_freq))
    measured_s, projected_s = average_over_kinds(costs.values()), average_over_kinds(projected.values())
    redone = _share_costs(tally, lambda cost: float(cost.redone))
    result: dict[str, Any] = {
        "kills": len(strikes),
        "lost": sum(outcome.lost for outcome in outcomes),
        "duplicated": sum(outcome.duplicated for outcome in outcomes),
        "hung": sum(strike.hung for strike in strikes),
        "ended": sum(bool(strike.ended) for strike in strikes),
        "stale": sum(outcome.stale for outcome in outcomes),
        "episodes": len(outcomes),
        "problems": [outcome.problem for outcome in outcomes if outcome.problem],
        "steps": sum(outcome.steps for outcome in outcomes),
        "operations": sum(outcome.operations for outcome in outcomes),
        "step_s": round(tally.step_s, 3),
        "cost_s": round(measured_s, 1),
        "projected_cost_s": round(projected_s, 1),
    }
    for share in SHARES:
        name = f"effective_training_time_{round(100 * share)}"
        result[name] = round(compute_effective_time(share, projected_s, PROJECTED_STEP_S), 4)
        result[f"{name}_measured"] = round(compute_effective_time(share, measured_s, tally.step_s or 1.0), 4)
    by_kind = _group(strikes)
    for name, attribute, share in (
        ("recovery_p50_s", "recovery_s", 0.5),
        ("recovery_p99_s", "recovery_s", 0.99),
        ("back_p50_s", "back_s", 0.5),
    ):
        values = {kind: _find(each, attribute, share) for kind, each in by_kind.items()}
        result[name] = {kind: round(value, 1) for kind, value in values.items() if value is not None}
    transports = {name: _describe_transport(tally, name) for name in sorted({one.transport for one in outcomes})}
    result |= {"seed": seed, "skipped": tally.skipped, "transports": transports}
    lines = [
        f"{'kind':22} {'faults':>6} {'back p50':>9} {'p99':>6} {'recovery p50':>13} {'p99':>6} {'again':>6} {'cost':>6}"
        f" {'at 60 s':>8} {'hung':>5} {'ended':>6}"
    ]
    for kind, each in sorted(by_kind.items()):
        cells = [
            _format(_find(each, name, share), 6)
            for name, share in (("back_s", 0.5), ("back_s", 0.99), ("recovery_s", 0.5), ("recovery_s", 0.99))
        ]
        lines.append(
            f"{kind:22} {len(each):6} {cells[0]:>9} {cells[1]:>6} {cells[2]:>13} {cells[3]:>6}"
            f" {_format(_mean(redone.get(kind)), 6)} {_format(_mean(costs.get(kind)), 6)}"
            f" {_format(_mean(projected.get(kind)), 8)} {sum(strike.hung for strike in each):5}"
            f" {sum(bool(strike.ended) for strike in each):6}"
        )
    lines += [
        f"{len(strikes)} faults in {len(outcomes)} episodes, {result['steps']} steps; undisturbed step"
        f" {tally.step_s:.2f} s; lost {result['lost']}, twice {result['duplicated']}, hung {result['hung']}",
        "times in seconds, from the end of a fault that lasts; again: steps; overlapping faults are in no percentile",
        FORMULA,
        f"{'steps hit':22} " + " ".join(f"{share:>8.0%}" for share in SHARES),
        f"{f'measured, {tally.step_s:.1f} s steps':22} "
        + " ".join(f"{result[f'effective_training_time_{round(100 * s)}_measured']:8.3f}" for s in SHARES),
        f"{'projected, 60 s steps':22} "
        + " ".join(f"{result[f'effective_training_time_{round(100 * s)}']:8.3f}" for s in SHARES)
        + f"   (save_freq {save_freq})",
    ]
    for name, row in transports.items():
        lines.append(f"{name:22} " + ", ".join(f"{key} {value}" for key, value in row.items()))
    lines += [f"skipped {kind}: {reason}" for kind, reason in sorted(tally.skipped.items())]
    return Report("\n".join(lines), result, find_failures(result))


def find_failures(result: dict[str, Any]) -> list[str]:
    """What misses a bar that a run must reach."""
    failures = [f"{result[name]} {name}" for name in ("lost", "duplicated", "hung", "stale") if result[name]]
    failures += result["problems"]
    if (effective := result["effective_training_time_10"]) < LEAST_EFFECTIVE:
        failures.append(f"projected effective training time {effective} at 10 %, at least {LEAST_EFFECTIVE} expected")
    return failures


def find_slow_kinds(result: dict[str, Any]) -> list[str]:
    """Kills after which a part was back later than its bar says, by the median."""
    times = {role: result["back_p50_s"].get(f"kill-{role}", 0.0) for role in BACK_BARS_S}
    return [f"kill-{r}: back after {t} s, bar {BACK_BARS_S[r]:g} s" for r, t in times.items() if t > BACK_BARS_S[r]]


def _describe_transport(tally: Tally, name: str) -> dict[str, Any]:
    """What happened in the episodes whose policies reached the engines in one way."""
    outcomes = [outcome for outcome in tally.outcomes if outcome.transport == name]
    strikes = [strike for strike in tally.strikes if strike.transport == name]
    ways = sum((outcome.ways for outcome in outcomes), Ways())
    found = [outcome.recomputed for outcome in outcomes]
    return {
        "faults": len(strikes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "lost": sum(outcome.lost for outcome in outcomes),
        "duplicated": sum(outcome.duplicated for outcome in outcomes),
        "hung": sum(strike.hung for strike in strikes),
        "ended": sum(bool(strike.ended) for strike in strikes),
        "stale": sum(outcome.stale for outcome in outcomes),
        **vars(ways),
        "recomputed_tokens": sum(one.tokens for one in found),
        "recomputed_policies": sum(one.policies for one in found),
        "told_apart": sum(one.told_apart for one in found),
        "largest_difference": max((one.largest for one in found), default=0.0),
    }


def _group(strikes: Iterable[Strike]) -> dict[str, list[Strike]]:
    kinds: dict[str, list[Strike]] = defaultdict(list)
    for strike in strikes:
        kinds[strike.kind].append(strike)
    return kinds


def _share_costs(tally: Tally, measure: Callable[[Any], float]) -> dict[str, list[float]]:
    """Kind → the costs of its faults; those of one incident share its cost."""
    costs: dict[str, list[float]] = defaultdict(list)
    for incident in tally.incidents:
        if incident.cost is not None:
            for strike in incident.strikes:
                costs[strike.kind].append(measure(incident.cost) / len(incident.strikes))
    return costs


def _find(strikes: Iterable[Strike], attribute: str, share: float) -> float | None:
    values = [getattr(strike, attribute) for strike in strikes if not strike.overlaps]
    return find_percentile([value for value in values if value is not None], share)


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _format(value: float | None, width: int) -> str:
    return f"{'–' if value is None else f'{value:.1f}':>{width}}"
