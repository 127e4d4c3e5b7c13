"""What of a trajectory is judged: its answer, and the evidence that it was shown."""

from __future__ import annotations

from forage_common.text.tags import Tag, find_blocks, find_last_block
from forage_reward.trajectory import Role, TrajectoryView


def extract_solution(view: TrajectoryView) -> str | None:
    """The last answer that the model itself wrote, stripped; None where there is none. "" is an answer."""
    for text in reversed(view.texts(Role.MODEL)):
        answer = find_last_block(text, Tag.ANSWER)
        if answer is not None:
            return answer.strip()
    return None


def observations(view: TrajectoryView) -> list[str]:
    """The contents of every `<information>` block that the environment wrote; feedback is none."""
    return [block for text in view.texts(Role.ENV) for block in find_blocks(text, Tag.INFORMATION)]
