"""`search`: the policy queries the retriever and is shown passages."""

from __future__ import annotations

from forage_common.text.observation import format_passages
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
            format_passages(documents).strip(), documents=documents, provenance=found.provenance, partial=found.partial
        )
