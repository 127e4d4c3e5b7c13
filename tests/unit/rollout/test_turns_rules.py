"""Which of several blocks of a generation is its action."""

from __future__ import annotations

import pytest

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_rollout.environments.environment import Episode
from forage_rollout.environments.search import Search
from forage_runtime.settings import RolloutSettings


@pytest.mark.parametrize(
    ("text", "tag", "content"),
    [
        ("<search> q </search> <answer>a</answer>", "search", "q"),
        ("<answer> a </answer> <search>q</search>", "answer", "a"),
        ("<search>q</search> <search>r</search>", "search", "q"),
        ("<answer>open <search>q</search>", "search", "q"),
    ],
)
def test_the_first_complete_block_is_the_action(text: str, tag: str, content: str) -> None:
    action = Search(RolloutSettings(), None).parse(text, Episode(Prompt()))  # type: ignore[arg-type]
    assert (action.tag, action.content) == (tag, content)
