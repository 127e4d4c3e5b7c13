"""An environment of one's own: the policy queries a knowledge graph instead of searching passages.

rollout:
  environments:
    knowledge_graph:
      name: examples/knowledge_graph/environment.py:KnowledgeGraph
      network: true
      params: {address: "127.0.0.1:18640"}
"""

from __future__ import annotations

import re
from typing import NamedTuple

import httpx

from forage_rollout.environments import Action, Environment, Episode, Observation
from forage_runtime.clients.calls import MalformedReplyError, RefusedError, call
from forage_runtime.clients.circuit import Circuit
from forage_runtime.clients.outgoing import bound_replies
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.settings import RolloutSettings

MAX_LENGTH = 500
"""Characters of a query."""
ARGUMENTS = {
    "get_tail_relations": "entity",
    "get_head_relations": "entity",
    "get_tail_entities": "entity, relation",
    "get_head_entities": "entity, relation",
}
"""Arguments of each function. A relation points from head to tail, as capital does from France to Paris."""
_CALL = re.compile(r"(\w+)\s*\((.*)\)", re.DOTALL)


class Query(NamedTuple):
    """A well-formed query; `relation` is empty where the function takes none."""

    function: str
    entity: str
    relation: str = ""


class QueryError(ValueError):
    """The text is no query; the message tells the policy why, and what one looks like."""


class KnowledgeGraph(Environment):
    """`<kg-query>` asks the graph server (`graph.py`), `<answer>` ends."""

    tags = ("kg-query", "answer")
    feedback = (
        "\nMy previous action is invalid. To ask the knowledge graph I should put a query between <kg-query> and "
        "</kg-query>. To give the final answer I should put it between <answer> and </answer>. Let me try again.\n"
    )

    def __init__(
        self,
        settings: RolloutSettings,
        retriever: RetrieverClient,
        address: str = "127.0.0.1:18640",
        timeout_s: float = 10.0,
    ) -> None:
        """
        Args:
            address: host:port of the graph server.
            timeout_s: of one query, with all its attempts.
        """
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ValueError(f"params.timeout_s is {timeout_s!r}: expected seconds above 0")
        if not re.fullmatch(r"[^:/\s]+:\d{1,5}", str(address)):
            raise ValueError(f"params.address is {address!r}: expected host:port")
        super().__init__(settings, retriever)
        self._timeout_s = timeout_s
        self._circuit = Circuit("knowledge graph", address)
        self._http = httpx.AsyncClient(base_url=f"http://{address}", timeout=None, **bound_replies())

    async def respond(self, action: Action, episode: Episode) -> Observation:
        try:
            query = parse(action.content)
        except QueryError as error:
            return Observation(str(error), succeeded=False)

        async def attempt(_: float) -> httpx.Response:
            response = await self._http.post("/query", json=query._asdict())
            return response if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY else response.raise_for_status()

        try:
            response = await call(self._circuit, attempt, self._timeout_s)
        except httpx.HTTPStatusError as error:
            raise RefusedError(f"the knowledge graph refused a query: {error}") from None
        try:
            body = response.json()
            if response.is_success:
                return Observation(", ".join(body["values"]) or "none")
            return Observation(str(body["error"]), succeeded=False)
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedReplyError(f"the knowledge graph at {self._circuit.address} said {error!r}") from None

    async def close(self) -> None:
        await self._http.aclose()


def parse(text: str) -> Query:
    """Read one query. Nothing in it is evaluated.

    An entity may hold commas and parentheses, a relation may not: the last comma divides the two.

    Raises:
        QueryError: it is none of the four.
    """
    if len(text) > MAX_LENGTH:
        raise QueryError(f"A query has at most {MAX_LENGTH} characters.")
    found = _CALL.fullmatch(text.strip())
    if found is None:
        raise QueryError("This is not a query. Write function(arguments), such as get_tail_entities(France, capital).")
    function, inside = found.groups()
    wanted = ARGUMENTS.get(function)
    if wanted is None:
        raise QueryError(f"There is no function {function}. There are: {', '.join(ARGUMENTS)}.")
    if wanted == "entity":
        query = Query(function, inside.strip())
    else:
        entity, _, relation = inside.rpartition(",")
        query = Query(function, entity.strip(), relation.strip())
    if not query.entity or (wanted != "entity" and not query.relation):
        raise QueryError(f"Write {function}({wanted}).")
    return query
