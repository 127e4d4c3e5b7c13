"""The pages Step and Group: the groups of a step, and what made their advantages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import pyarrow.compute as pc

from forage_console.details.token_columns import round_value
from forage_console.details.trajectory import read_details
from forage_console.errors import NotFoundError
from forage_console.models.base import GroupState
from forage_console.models.trajectories import (
    Address,
    Bin,
    GroupDetail,
    GroupRow,
    StepDetail,
    TrajectoryDetail,
    TrajectoryRow,
)
from forage_console.reading.metrics import StepMetrics
from forage_console.store.files import DataFile
from forage_console.store.queries import find_rows
from forage_console.store.run_store import UNREADABLE, RunStore
from forage_records.run_settings import RunSettings
from forage_records.step_file import Fate, GroupFate, read_group_fates

_BINS = 40
_COMPARING = ("grpo", "grpo_multiturn", "rloo")
"""Estimators that compare the samples of a group: equal rewards have no advantage."""
_STATES: Mapping[Fate, GroupState] = {
    Fate.TRAINED: GroupState.TRAINED,
    Fate.DEAD: GroupState.FAILED,
    Fate.FILTERED: GroupState.FILTERED,
    Fate.UNUSED: GroupState.DROPPED,
    Fate.DROPPED: GroupState.DROPPED,
}


@dataclass(frozen=True)
class StepLine:
    """What the metrics say of a step. values: None where they have no line of it."""

    values: dict[str, float | None] | None
    guards: list[str]


def read_step(store: RunStore, step: int, line: StepLine, settings: RunSettings) -> StepDetail:
    """Read what is known of a step.

    Raises:
        NotFoundError: there is neither a line of metrics nor a file of it.
    """
    place = f"step-{step}"
    saved = sorted(file.step for file in store.files.values() if file.step is not None)
    values = line.values
    if values is None and step not in saved:
        raise NotFoundError(f"there is no step {step} in {store.run.name}: it has not been taken")
    detail = StepDetail(
        step=step,
        version=None,
        metrics=None if values is None else {n: v for n, v in values.items() if not n.startswith("seconds.")},
        seconds={
            name.removeprefix("seconds."): value
            for name, value in (values or {}).items()
            if name.startswith("seconds.") and value is not None
        },
        guards=line.guards,
        is_saved=step in saved,
        trajectories=0,
        groups=[],
        advantages=[],
        previous=max((one for one in saved if one < step), default=None),
        next=min((one for one in saved if one > step), default=None),
    )
    if step not in saved:
        return detail
    file = store.require(place)
    rows = find_rows(store, "place = ?", [place], "uid, sample")
    try:
        version, bins = _read_version(file), _count_advantages(file)
        fates = read_group_fates(file.path)
    except UNREADABLE:
        version, bins, fates = None, [], None
    groups = _list_groups(rows, fates, settings)
    return detail.model_copy(
        update={"version": version, "trajectories": len(rows), "groups": groups, "advantages": bins}
    )


def read_group(store: RunStore, place: str, uid: str, settings: RunSettings, trace_url: str) -> GroupDetail:
    """Read all samples of a prompt.

    Raises:
        NotFoundError: there is no such group.
    """
    file = store.require(place)
    rows = find_rows(store, "place = ? AND uid = ?", [place, uid], 'sample, "row"')
    if not rows:
        raise NotFoundError(f"there is no group '{uid[:100]}' in {place}: the page Step lists those that exist")
    details = read_details(store, file, rows, settings.read_text("model.path"), trace_url)
    try:
        fates = read_group_fates(file.path) if file.step is not None else None
    except UNREADABLE:
        fates = None
    (group,) = (one for one in _list_groups(rows, fates, settings) if one.uid == uid)
    baseline, deviation = _compare(rows, settings) if file.step is not None else (None, None)
    return GroupDetail(
        uid=uid,
        place=place,
        data_source=rows[0].data_source,
        question=rows[0].question,
        targets=rows[0].targets,
        state=group.state,
        reason=group.reason,
        estimator=settings.algorithm if file.step is not None else None,
        baseline=baseline,
        deviation=deviation,
        samples=[_explain(detail, rows, settings) if file.step is not None else detail for detail in details],
    )


def explain(store: RunStore, detail: TrajectoryDetail, settings: RunSettings) -> TrajectoryDetail:
    """Add what made the advantage of a trajectory."""
    if detail.summary.step is None:
        return detail
    place, uid = detail.summary.place, detail.summary.uid
    return _explain(detail, find_rows(store, "place = ? AND uid = ?", [place, uid]), settings)


def _explain(detail: TrajectoryDetail, group: Sequence[TrajectoryRow], settings: RunSettings) -> TrajectoryDetail:
    baseline, deviation = _compare(group, settings)
    if settings.algorithm == "rloo":
        others = [one.reward for one in group if one.trained and one.reward is not None and one != detail.summary]
        baseline = round_value(fmean(others)) if others and detail.summary.trained else None
    changes = {"estimator": settings.algorithm, "baseline": baseline, "deviation": deviation}
    return detail.model_copy(update=changes)


def _compare(rows: Sequence[TrajectoryRow], settings: RunSettings) -> tuple[float | None, float | None]:
    """Mean and deviation of the rewards of a group; None where the estimator does not use them."""
    rewards = [row.reward for row in rows if row.trained and row.reward is not None]
    if settings.algorithm not in ("grpo", "grpo_multiturn") or not rewards:
        return None, None
    by_std = settings.flat.get("trainer.algorithm.norm_adv_by_std_in_grpo", True)
    deviation = round_value(stdev(rewards)) if by_std and len(rewards) > 1 else None
    return round_value(fmean(rewards)), deviation


def read_line(metrics: StepMetrics, step: int) -> StepLine:
    """Read what the metrics say of a step."""
    place = int(np.searchsorted(metrics.steps, step))
    if place >= len(metrics.steps) or metrics.steps[place] != step:
        return StepLine(None, [])
    found = {
        name: None if place >= len(column) or math.isnan(column[place]) else column[place]
        for name, column in metrics.columns.items()
    }
    return StepLine(found, [name for at, name in metrics.guards if at == step])


def _list_groups(
    rows: Sequence[TrajectoryRow], fates: Sequence[GroupFate] | None, settings: RunSettings
) -> list[GroupRow]:
    """List groups by the spread of their rewards, the largest first; those that are not in the file come last."""
    groups: dict[str, list[TrajectoryRow]] = {}
    for row in rows:
        groups.setdefault(row.uid, []).append(row)
    known = {fate.uid: fate for fate in sorted(fates or (), key=lambda fate: fate.attempt)}
    found = [_build_group(uid, samples, known.get(uid), settings) for uid, samples in groups.items()]
    found.sort(key=lambda group: -1 if group.spread is None else group.spread, reverse=True)
    for fate in fates or ():
        if fate.uid not in groups:
            uid = fate.uid or f"position {fate.position}"
            found.append(
                GroupRow(
                    uid=uid,
                    data_source=uid.rsplit("/", 3)[0] if fate.uid else "",
                    question="",
                    state=_STATES[fate.fate],
                    reason=fate.reason or None,
                    rewards=[],
                    mean=None,
                    spread=None,
                    samples=[],
                )
            )
    return found


def _build_group(uid: str, samples: Sequence[TrajectoryRow], fate: GroupFate | None, settings: RunSettings) -> GroupRow:
    rewards = [row.reward for row in samples if row.reward is not None]
    spread = max(rewards) - min(rewards) if rewards else None
    state, reason = _judge(samples, spread, fate, settings)
    return GroupRow(
        uid=uid,
        data_source=samples[0].data_source,
        question=samples[0].question,
        state=state,
        reason=reason,
        rewards=[row.reward for row in samples],
        mean=round_value(fmean(rewards)) if rewards else None,
        spread=round_value(spread) if spread is not None else None,
        samples=[Address(place=row.place, row=row.row) for row in samples],
    )


def _judge(
    samples: Sequence[TrajectoryRow], spread: float | None, fate: GroupFate | None, settings: RunSettings
) -> tuple[GroupState, str | None]:
    if fate is not None and fate.fate is not Fate.TRAINED:
        return _STATES[fate.fate], fate.reason or None
    trained = [row.reward for row in samples if row.trained and row.reward is not None]
    if not trained:
        reasons = [row.reason for row in samples if row.reason]
        return GroupState.FAILED, reasons[0] if reasons else "no sample was trained on"
    if settings.algorithm in _COMPARING and max(trained) == min(trained) and not any(row.advantage for row in samples):
        return GroupState.DEAD, "all rewards are equal: its advantages are 0"
    return GroupState.TRAINED, None


def _read_version(file: DataFile) -> int | None:
    with file.open_parquet() as parquet:
        if not parquet.metadata.num_rows:
            return None
        version: int | None = parquet.read_row_group(0, columns=["version"])["version"][0].as_py()
        return version


def _count_advantages(file: DataFile) -> list[Bin]:
    """Count the advantages of the tokens that were trained on."""
    values = np.concatenate([np.empty(0, np.float32), *_read_advantages(file)])
    if not len(values):
        return []
    low, high = float(values.min()), float(values.max())
    counts, edges = np.histogram(values, _BINS, (low, high) if high > low else (low - 0.5, low + 0.5))
    return [
        Bin(low=round_value(a) or 0.0, high=round_value(b) or 0.0, count=int(count))
        for a, b, count in zip(edges, edges[1:], counts, strict=False)
    ]


def _read_advantages(file: DataFile) -> Iterator[np.ndarray]:
    with file.open_parquet() as parquet:
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=["advantages", "loss_mask"], use_threads=False)
            known = table.filter(pc.and_(table["advantages"].is_valid(), table["loss_mask"].is_valid()))
            values, mask = (
                known[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                for name in ("advantages", "loss_mask")
            )
            yield values[(mask == 1) & np.isfinite(values)]
