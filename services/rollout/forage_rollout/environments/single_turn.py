"""`single_turn`: one generation, judged by its verifier; nothing answers."""

from __future__ import annotations

from forage_common.settings import RolloutSettings
from forage_common.v1.trajectory_pb2 import ActionKind
from forage_rollout.clients import Retriever
from forage_rollout.environments.environment import ANSWER, INVALID, Action, Environment, Episode

EOS = "eos"


class SingleTurn(Environment):
    """Answers at once, between `<answer>` and `</answer>` or in whatever form the verifier reads.

    `stop: eos` lets a generation run until it ends by itself; without an answer block all of it is the answer then.
    """

    def __init__(self, settings: RolloutSettings, retriever: Retriever, stop: str = ANSWER) -> None:
        if stop not in (ANSWER, EOS):
            raise ValueError(f"params.stop is {stop!r}: give {ANSWER} (a generation ends after </answer>) or {EOS}")
        super().__init__(settings, retriever)
        self.max_turns = 0
        self._to_the_end = stop == EOS

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self._to_the_end else super().stops

    def parse(self, text: str, episode: Episode) -> Action:
        action = super().parse(text, episode)
        if action is INVALID and self._to_the_end and not episode.hit_length:
            return Action(ActionKind.ACTION_KIND_ANSWER, text.strip())
        return action
