"""What is computed from measured faults: percentiles, and the training time that is left when steps are hit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHARES = (0.01, 0.05, 0.10)
"""Shares of the steps that a fault hits."""
PROJECTED_STEP_S = 60.0
DURABLE_AFTER_STEPS = 0.7
"""Assumed time from a checkpoint to its acknowledgement: 84 GB (7B, 12 bytes a parameter) at 2 GB/s, in such steps."""


@dataclass(frozen=True)
class Cost:
    """What a fault costs.

    Attributes:
        lost_s: time until the next fault, less that of the steps which were taken in it at the undisturbed speed.
        redone: steps that were taken again.
        restarted_trainer, restarted_rollout: whether a trainer, or an engine or dispatcher, began anew.
        older_checkpoint: whether the newest checkpoint was lost, too.
    """

    lost_s: float
    redone: int
    restarted_trainer: bool = False
    restarted_rollout: bool = False
    older_checkpoint: bool = False

    def outage_s(self, step_s: float) -> float:
        """The part that does not depend on how long steps take: all but the steps taken again."""
        return max(0.0, self.lost_s - self.redone * step_s)

    def repeated_steps(self, save_freq: int) -> float:
        """The work that is expected to be done again, in steps, with a checkpoint every `save_freq` steps.

        A trainer that begins anew repeats the steps since its checkpoint, on average half of an interval less one, what
        it took while that checkpoint became durable, and half of the step that it was in; with a damaged checkpoint a
        whole interval more. An engine or a dispatcher that begins anew repeats what was in flight: a batch, on average
        half done.
        """
        steps = 0.0
        if self.restarted_trainer:
            steps += (save_freq - 1) / 2 + DURABLE_AFTER_STEPS + 0.5
        if self.older_checkpoint:
            steps += save_freq
        if self.restarted_rollout:
            steps += 0.5
        return steps

    def project_s(self, demo_step_s: float, save_freq: int, step_s: float = PROJECTED_STEP_S) -> float:
        """The cost in a run whose steps take `step_s`: the measured outage, and the work done again."""
        return self.outage_s(demo_step_s) + self.repeated_steps(save_freq) * step_s


def compute_effective_time(share: float, cost_s: float, step_s: float) -> float:
    """The share of the undisturbed speed that is left when a share of the steps is hit, each at `cost_s`."""
    return step_s / (step_s + share * max(0.0, cost_s))


def average_over_kinds(costs: Iterable[Sequence[float]]) -> float:
    """The mean cost of a failure of a random kind: every kind counts the same, however often it was tried."""
    means = [sum(kind) / len(kind) for kind in costs if kind]
    return sum(means) / len(means) if means else 0.0


def find_percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def shuffle_deck(kinds: Sequence[str], count: int, generator: random.Random) -> list[str]:
    """Deal `count` kinds in random order, each about as often as the others."""
    deck: list[str] = []
    while len(deck) < count and kinds:
        round_of_all = generator.sample(kinds, len(kinds))
        deck += round_of_all[: count - len(deck)]
    generator.shuffle(deck)
    return deck


def draw_pause_s(generator: random.Random, shortest: float, longest: float) -> float:
    """A duration whose logarithm is uniform: as many between 1 and 4 seconds as between 15 and 60."""
    return math.exp(generator.uniform(math.log(shortest), math.log(longest)))
