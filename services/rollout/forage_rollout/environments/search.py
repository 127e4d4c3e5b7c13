"""`search`: the policy queries the retriever and observes passages."""

from __future__ import annotations

from forage_rollout.environments.environment import ANSWER, Action, Environment, Episode, Observation
from forage_runtime.text.observation import format_passages


class Search(Environment):
    """`<search>` queries the retriever, `<answer>` ends the trajectory. The texts are Search-R1's."""

    tags = ("search", ANSWER)
    feedback = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    )

    async def respond(self, action: Action, episode: Episode) -> Observation:
        result = await self.retriever.search([action.content])
        documents = result.documents[0]
        return Observation(
            format_passages(documents).strip(),
            documents=documents,
            provenance=result.provenance,
            partial=result.partial,
        )
