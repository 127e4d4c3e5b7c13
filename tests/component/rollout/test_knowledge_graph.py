"""The example of one's own environment: its real graph server, and the real agent; a scripted policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from char_codec import CharCodec
from hypothesis import given, settings
from hypothesis import strategies as st
from knowledge_graph import graph, load_environment, run, say_query
from scripted_engine import ScriptedEngine

from forage_proto.v1.trajectory_pb2 import Status
from forage_runtime.settings import RolloutSettings

environment = load_environment()
__all__ = ["graph"]


async def test_an_unavailable_graph_leaves_a_status_and_no_score(free_address: Callable[[], str]) -> None:
    engine = ScriptedEngine(CharCodec(), [say_query("get_tail_entities(Lyon, country)")])
    trajectory = await run(engine, free_address(), free_address(), timeout_s=0.3)
    assert trajectory.status == Status.STATUS_TIMEOUT
    assert "knowledge graph" in trajectory.status_detail
    assert not trajectory.HasField("score")


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("get_tail_relations(France)", "capital, currency"),
        ("get_head_relations(France)", "country"),
        ("get_head_entities(France, country)", "Lyon, Paris"),
        ("get_tail_entities(Bonaire, Saba (Islands), capital)", "Kralendijk"),
        ("get_tail_relations(Euro)", "none"),
        (
            "get_tail_entities(France, mayor)",
            "France has no relation mayor in this direction. It has: capital, currency.",
        ),
        ("get_tail_entities(Atlantis, capital)", "The graph has no entity Atlantis."),
    ],
)
async def test_the_graph_answers_each_function(graph: str, query: str, shown: str) -> None:
    graph_environment = environment.KnowledgeGraph(RolloutSettings(), None, address=graph)
    action = graph_environment.parse(say_query(query), None)
    observation = await graph_environment.respond(action, None)
    await graph_environment.close()
    assert observation.body == shown
    assert observation.succeeded == (not shown.endswith("."))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "This is not a query."),
        ("France", "This is not a query."),
        ("get_capital(France)", "There is no function get_capital."),
        ("get_tail_entities(France)", "Write get_tail_entities(entity, relation)."),
        ("get_tail_entities(, capital)", "Write get_tail_entities(entity, relation)."),
        ("get_tail_entities(France, )", "Write get_tail_entities(entity, relation)."),
        ("get_tail_relations( )", "Write get_tail_relations(entity)."),
        ("get_tail_relations(France) get_tail_relations(Lyon)x", "This is not a query."),
        ("get_tail_relations(" + "x" * 500 + ")", "A query has at most 500 characters."),
    ],
)
def test_a_malformed_query_is_explained(text: str, words: str) -> None:
    with pytest.raises(environment.QueryError) as error:
        environment.parse(text)
    assert str(error.value).startswith(words)


@settings(max_examples=40)
@given(st.text(alphabet="get_tailhdrons(), \n", max_size=80) | st.text(max_size=80))
def test_no_text_breaks_the_parser_of_queries(text: str) -> None:
    try:
        query = environment.parse(text)
    except environment.QueryError:
        return
    assert query.entity == query.entity.strip() != ""
    assert ("entities" in query.function) == bool(query.relation)
