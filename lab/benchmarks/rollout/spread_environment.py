"""The plan as an environment: actions and lengths are the plan's, whatever the tiny policy says."""

from __future__ import annotations

from plan import Row

from forage_proto.v1.trajectory_pb2 import ActionKind
from forage_rollout.environments.environment import ANSWER, Action, Budget, Episode
from forage_rollout.environments.search import Search


class Spread(Search):
    """Searches are real ones; only when there is one, and for what, is planned."""

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    def budget(self, episode: Episode) -> Budget:
        tokens = _find_row(episode).lengths[episode.turn - 1]
        return Budget(max_tokens=tokens, min_tokens=tokens)

    def parse(self, text: str, episode: Episode) -> Action:
        row = _find_row(episode)
        if episode.turn == len(row.lengths):
            return Action(ActionKind.ACTION_KIND_ANSWER, "none", ANSWER)
        return Action(ActionKind.ACTION_KIND_SEARCH, row.build_query(episode.turn), "search")


def _find_row(episode: Episode) -> Row:
    return Row(episode.prompt.group_uid, episode.sample)
