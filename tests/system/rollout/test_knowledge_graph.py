"""The example of one's own environment: its real graph server, the real agent, the real reward service; a scripted
policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from char_codec import CharCodec
from knowledge_graph import graph, run, say_query
from scripted_engine import ScriptedEngine

from forage_proto.v1.trajectory_pb2 import Status

__all__ = ["graph"]


@pytest.fixture
def reward(
    start_service: Callable[..., Any], wait_until_ready: Callable[..., None], free_address: Callable[[], str]
) -> str:
    """host:port of a reward service that judges by `structured`."""
    address, health = free_address(), free_address()
    process = start_service(
        "reward",
        f"reward.grpc_address={address}",
        f"reward.health_address={health}",
        "reward.routes.knowledge_graph.name=structured",
    )
    wait_until_ready(process, health)
    return address


async def test_only_a_new_query_that_the_graph_could_answer_is_valid(graph: str, reward: str) -> None:
    asked = [
        ("get_tail_entities(Lyon, country)", True, "France"),
        ("get_tail_entities(Lyon, country", False, "This is not a query."),
        ("get_tail_entities(lyon,  country)", True, "France"),  # asked before
        ("get_head_entities(France, country)", True, "Lyon, Paris"),
        ("get_tail_entities(Lyn, country)", False, "The graph has no entity Lyn. Did you mean Lyon?"),
        ("__import__('os').system(1)", False, "There is no function __import__."),
        ("get_tail_entities(France, capital)", True, "Paris"),
    ]
    lines = [*(say_query(query) for query, _, _ in asked), "<think>t</think> <answer> Paris </answer>"]
    trajectory = await run(ScriptedEngine(CharCodec(), lines), graph, reward)
    assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
    observations = [span.text for span in trajectory.spans[2::2]]
    for searched_turn, shown, (query, known, says) in zip(trajectory.turns, observations, asked, strict=False):
        assert (searched_turn.tag, searched_turn.content, searched_turn.executed) == ("kg-query", query, True)
        assert searched_turn.retrieval_status == (Status.STATUS_OK if known else Status.STATUS_INVALID_INPUT)
        assert shown.startswith(f"\n\n<information>{says}")
        assert shown.endswith("</information>\n\n")
    parts = {part.name: part for part in trajectory.score.components}
    # kg_query_validity 0.1 for a new query that succeeded, format_score 0.15 for each well-formed turn
    earned = [parts[f"turn_{index}"].raw for index in range(1, 9)]
    assert earned == pytest.approx([0.25, 0.15, 0.15, 0.25, 0.15, 0.15, 0.25, 0.25])
    assert parts["_query_validity"].raw == pytest.approx(3 / 8)
    assert parts["exact_match"].raw == parts["retrieval_quality"].raw == 1.0
