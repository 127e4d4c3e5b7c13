"""The world facts as a knowledge graph: triples, and the same questions with a prompt that explains the tool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from forage_cli.datasets.world.facts import Facts, load_facts
from forage_cli.datasets.world.write import write_data_set

DATA_SOURCE = "knowledge_graph"
PROMPT_PREFIX = (
    "Answer the question with the help of a knowledge graph of facts (head, relation, tail). "
    "Think inside <think> and </think> first, every time you have learnt something. "
    "To ask the graph, write one query inside <kg-query> and </kg-query>; "
    "its result comes between <information> and </information>. There are four queries: "
    "get_tail_relations(entity) and get_head_relations(entity) give the relations in which the entity is head or tail; "
    "get_tail_entities(entity, relation) and get_head_entities(entity, relation) give what it is related to. "
    "For example, <kg-query> get_tail_entities(France, capital) </kg-query>. "
    "When you know the answer, write it inside <answer> and </answer>, without explanations. "
    "For example, <answer> Beijing </answer>. Question: "
)
"""The question and a newline follow."""


class Triple(NamedTuple):
    """One fact: `head` has `relation` to `tail`, as France has capital Paris."""

    head: str
    relation: str
    tail: str


@dataclass(frozen=True)
class GraphSummary:
    """Result of `build_knowledge_graph`: number of triples, questions per split, SHA-256 digests by file name."""

    triples: int
    questions: dict[str, int]
    digests: dict[str, str]


def make_triples(facts: Facts) -> list[Triple]:
    """Make a triple of every fact, in an order that depends on the tables alone.

    Relations: a country's `capital` and `currency`; the `country` of a city, a capital or a subdivision. The tables
    write a few names in several ways; here the first spelling is used.
    """
    found = []
    spelt: dict[str, str] = {}
    for country in facts.countries.values():
        found += [Triple(country.name, "capital", country.capital), Triple(country.name, "currency", country.currency)]
    for place in facts.places:
        if place.kind != "currency":
            found.append(Triple(place.name, "country", facts.countries[place.country].name))

    def named(name: str) -> str:
        return spelt.setdefault(name.strip().lower(), name.strip())

    return list(dict.fromkeys(Triple(named(head), relation, named(tail)) for head, relation, tail in found))


def build_knowledge_graph(out: Path, seed: int) -> GraphSummary:
    """Write `triples.jsonl`, `{train,validation,test}.parquet`, `manifest.json` to `out` (created if missing).

    The same seed and the same package versions give the same bytes; the splits are those of the world.
    """
    facts = load_facts()
    graph = make_triples(facts)
    rows = {"triples": [triple._asdict() for triple in graph]}
    return GraphSummary(
        len(graph), *write_data_set(out, seed, facts, "triples.jsonl", rows, DATA_SOURCE, PROMPT_PREFIX)
    )
