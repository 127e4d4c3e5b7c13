"""What is sampled and found, the same in every process: trajectories of about 2,000 tokens in four generations.

The policy thinks and searches until its context has `ANSWER_AT` tokens, and then answers. Lengths are lognormal, so
trajectories end at different times and wait for the slowest of their group.
"""

from __future__ import annotations

import math
import random

DATA_SOURCE = "scale"
SAMPLES = 5
"""Of a prompt, as in the recipes of Search-R1."""
MAX_RESPONSE, MAX_OBSERVATION, MAX_TURNS = 512, 400, 12
ANSWER_AT = 1450
_MEDIAN, _SIGMA, _SHORTEST = 180, 0.6, 32
_FASTEST_S, _SLOWEST_S = 0.2, 2.0
_QUESTION, _DOCUMENT = 180, 130
"""Characters; about 180 tokens of the tiny policy's tokenizer, and 300 of the three documents of a search."""
_WORDS = [
    "".join(random.Random(f"word/{number}").choices("etaoinshrdlucmfwypvbgk", k=2 + number % 8))
    for number in range(2000)
]  # fmt: skip


def draw_length(chance: random.Random) -> int:
    """Tokens of a generation."""
    return min(MAX_RESPONSE, max(_SHORTEST, round(chance.lognormvariate(math.log(_MEDIAN), _SIGMA))))


def draw_delay_s(chance: random.Random) -> float:
    """Seconds of a search: 0.2 to 2, each factor as likely."""
    return math.exp(chance.uniform(math.log(_FASTEST_S), math.log(_SLOWEST_S)))


def build_question(uid: str) -> str:
    """The user message of a prompt."""
    return draw_text(f"question/{uid}", _QUESTION)


def build_documents(seed: str) -> list[str]:
    """What one search finds."""
    return [f'"{seed}"\n{draw_text(f"document/{seed}/{rank}", _DOCUMENT)}' for rank in range(3)]


def draw_text(seed: str, characters: int) -> str:
    """Words, the same for the same seed."""
    chance = random.Random(seed)
    words: list[str] = []
    while sum(map(len, words)) + len(words) < characters:
        words.append(chance.choice(_WORDS))
    return " ".join(words)
