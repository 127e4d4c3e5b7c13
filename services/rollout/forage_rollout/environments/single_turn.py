"""`single_turn`: one generation, scored by its reward; no observation."""

from __future__ import annotations

from forage_proto.v1.trajectory_pb2 import ActionKind
from forage_rollout.environments.environment import ANSWER, INVALID, Action, Environment, Episode
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.settings import RolloutSettings

EOS = "eos"


class SingleTurn(Environment):
    """The only generation answers, between `<answer>` and `</answer>` or in the form that the reward reads.

    With `stop: eos` the generation runs to its end-of-sequence token; without an answer block all of it is the answer.
    """

    def __init__(self, settings: RolloutSettings, retriever: RetrieverClient, stop: str = ANSWER) -> None:
        if stop not in (ANSWER, EOS):
            raise ValueError(f"params.stop is {stop!r}: expected {ANSWER} (a generation ends after </answer>) or {EOS}")
        super().__init__(settings, retriever)
        self.max_turns = 0
        self._stops_at_eos = stop == EOS

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self._stops_at_eos else super().stops

    def parse(self, text: str, episode: Episode) -> Action:
        action = super().parse(text, episode)
        if action is INVALID and self._stops_at_eos and not episode.hit_length:
            return Action(ActionKind.ACTION_KIND_ANSWER, text.strip())
        return action
