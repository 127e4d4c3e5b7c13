"""Prints how many well-formed trajectories are valid where the chat template begins the policy's turn.

Over the ends of 66 models' prompts (tests/data/templates/ends.json): a right and a wrong answer, without a search and
with one. "Sampled text alone" scores as if what the template wrote were part of the question.
usage: .venvs/reward/bin/python lab/openings.py
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests/unit/reward"))
from test_openings import ENDS, LAST, SEARCHED, score

_VALID = {"search_r1_format": ("format", 1.0), "structured": ("turn_1", 0.25)}
"""Reward → the component that says that the format is valid, and its least value then."""


def is_valid(reward: str, prompt: str, opening: str, turns: list[str]) -> bool:
    name, least = _VALID[reward]
    values = {component.name: component.raw for component in score(reward, prompt, opening, turns).components}
    return values[name] >= least - 1e-9


def main() -> None:
    for reward in _VALID:
        before, after = set(), set()
        for end, kind, searches in product(ENDS, ("right", "wrong"), (0, 1)):
            prompt, opening = "Question: who?" + end["prompt"].removesuffix(end["opening"]), end["opening"]
            turns = [*SEARCHED, LAST[kind]] if searches else [LAST[kind]]
            turns[0] = turns[0].removeprefix(opening)
            case = end["model"], kind, searches
            before |= {case} if is_valid(reward, prompt + opening, "", turns) else set()
            after |= {case} if is_valid(reward, prompt, opening, turns) else set()
        never = sorted({end["model"] for end in ENDS} - {model for model, _, _ in after})
        sys.stdout.write(
            f"{reward}: of {4 * len(ENDS)} well-formed trajectories {len(before)} are valid by sampled text alone, "
            f"{len(after)} with the opening; never: {', '.join(never)}\n"
        )


if __name__ == "__main__":
    main()
