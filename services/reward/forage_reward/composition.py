"""Weighted sums of rewards. Each part keeps its own components, scaled by its weight.

| status of a part | effect on the sum                                                        |
|------------------|--------------------------------------------------------------------------|
| OK               | its weighted components are added                                        |
| ABSTAIN          | adds nothing and is listed; when all parts abstain, so does the sum      |
| any other        | the sum has that status and no value, so a failure never counts as a 0   |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forage_reward.reward import Scorer
from forage_reward.score import Component, Score, Status, sum_components, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView


@dataclass(frozen=True)
class CompositionPart:
    """One reward of a composition; `label` is its name within the score."""

    label: str
    weight: float
    scorer: Scorer


def compose_scorers(name: str, parts: Sequence[CompositionPart]) -> Scorer:
    """Combine several rewards into their weighted sum.

    Its components are `<label>.<component>` of every part, which add up to the total, and for logs `_<label>`, the
    part's unweighted total, or `_<label>.abstained`.
    """

    def score(view: TrajectoryView, truth: GroundTruth) -> Score:
        components: list[Component] = []
        details = []
        abstained = 0
        for part in parts:
            result = part.scorer(view, truth)
            details.append(f"{part.label}: {result.detail}")
            if result.status is Status.ABSTAIN:
                abstained += 1
                components.append(Component(f"_{part.label}.abstained", 1.0, 0.0))
            elif result.status is not Status.OK:
                return withhold_score(result.status, name, details[-1])
            else:
                components += [_scale_component(part, component) for component in result.components]
                components.append(Component(f"_{part.label}", result.total, 0.0))
        total = sum_components(name, tuple(components), "; ".join(details))
        return total._replace(status=Status.ABSTAIN) if abstained == len(parts) else total

    return score


def _scale_component(part: CompositionPart, component: Component) -> Component:
    if component.name.startswith("_"):
        return Component(f"_{part.label}.{component.name[1:]}", component.raw, 0.0)
    return Component(f"{part.label}.{component.name}", component.raw, part.weight * component.weighted)
