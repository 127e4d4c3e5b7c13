"""The answer of a trajectory, and the evidence that the environment returned."""

from __future__ import annotations

from forage_reward.trajectory import Role, TrajectoryView
from forage_runtime.text.tags import Tag, find_blocks, find_last_block


def extract_solution(view: TrajectoryView) -> str | None:
    """Extract the last answer of the model, stripped; None where there is none. An empty answer is "", not None."""
    for text in reversed(view.texts(Role.MODEL)):
        answer = find_last_block(text, Tag.ANSWER)
        if answer is not None:
            return answer.strip()
    return None


def extract_observations(view: TrajectoryView) -> list[str]:
    """Extract the contents of every `<information>` block of the environment; feedback texts have none."""
    return [block for text in view.texts(Role.ENV) for block in find_blocks(text, Tag.INFORMATION)]
