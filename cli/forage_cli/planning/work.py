"""The tokens of a step, from the limits of the settings and how far they are filled."""

from __future__ import annotations

from dataclasses import dataclass

from forage_runtime.settings import Settings


@dataclass(frozen=True)
class Work:
    """A step's trajectories and their mean lengths, in tokens.

    Attributes:
        searches: of a trajectory; it has one generation more.
        longest_generated: generated tokens of a trajectory that reaches every limit.
    """

    trajectories: int
    samples: int
    prompt: float
    generated: float
    observed: float
    searches: float
    longest_generated: int
    longest_searches: int

    @property
    def length(self) -> float:
        """Of a whole trajectory."""
        return self.prompt + self.generated + self.observed


def estimate_work(settings: Settings, fill: float) -> Work:
    """The work of a step whose trajectories fill this share of every limit, on average."""
    rollout = settings.rollout
    searches = rollout.max_turns * fill
    return Work(
        trajectories=settings.data.train_batch_size * rollout.n,
        samples=rollout.n,
        prompt=rollout.max_start_length * fill,
        generated=(searches + 1) * rollout.max_response_length * fill,
        observed=searches * rollout.max_obs_length * fill,
        searches=searches,
        longest_generated=(rollout.max_turns + 1) * rollout.max_response_length,
        longest_searches=rollout.max_turns,
    )
