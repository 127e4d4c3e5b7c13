"""`search`: the policy queries the retriever and is shown passages."""

from __future__ import annotations

from collections.abc import Sequence

from forage_common.v1.trajectory_pb2 import Document
from forage_rollout.environments.environment import ANSWER, Action, Environment, Episode, Observation


class Search(Environment):
    """`<search>` asks the retriever, `<answer>` ends."""

    tags = ("search", ANSWER)
    feedback = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    )

    async def respond(self, action: Action, episode: Episode) -> Observation:
        found = await self.retriever.search([action.content])
        documents = found.documents[0]
        return Observation(
            passages(documents).strip(), documents=documents, provenance=found.provenance, partial=found.partial
        )


def passages(documents: Sequence[Document]) -> str:
    """ "Doc 1(Title: first line) other lines\\n" for every document.

    A document without a newline is all title.
    """
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, body = document.contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {body}\n")
    return "".join(lines)
