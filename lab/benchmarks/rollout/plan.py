"""Plan that every sampling method follows: the turns of each trajectory, their lengths, the results of searches.

A pure function of names, so that services, baselines and the ideal agree on every token count without exchanging
it: the number of turns falls off geometrically over 1 to 4 (2.3 on average), lengths are lognormal with a median of
24 tokens and a cap of 64, prompts and observations have about 100 tokens. All but the last turn search; the last one
answers.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

DATA_SOURCE = "spread"
MAX_TURNS = 4
MEDIAN_TOKENS, SIGMA, MIN_TOKENS, MAX_TOKENS = 24, 0.7, 4, 64
_FALL_OFF = 0.85
_CHARACTERS = 130
"""Of a prompt and of a document: about 100 tokens of the tiny policy's tokenizer."""
_WORDS = [
    "".join(random.Random(f"word/{number}").choices("etaoinshrdlucmfwypvbgk", k=2 + number % 8))
    for number in range(2000)
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One trajectory: sample `sample` of the prompt `uid`."""

    uid: str
    sample: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each generation, in order; the same in every pass."""
        prompt, _, _ = self.uid.rpartition("/")
        chance = random.Random(f"{prompt}/{self.sample}")
        (turns,) = chance.choices(range(1, MAX_TURNS + 1), [_FALL_OFF**turn for turn in range(MAX_TURNS)])
        drawn = (round(chance.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)) for _ in range(turns))
        return tuple(min(MAX_TOKENS, max(MIN_TOKENS, tokens)) for tokens in drawn)

    def build_query(self, turn: int) -> str:
        """Build the query of turn `turn`, counted from 1."""
        return f"{self.uid}/{self.sample}/{turn}"


def list_uids(count: int, pass_: int) -> list[str]:
    """List the names of prompts; another pass over them has other texts, which no prefix cache knows."""
    return [f"{DATA_SOURCE}/bench/{index}/{pass_}" for index in range(count)]


def list_rows(uids: list[str], samples: int) -> list[Row]:
    return [Row(uid, sample) for uid in uids for sample in range(samples)]


def build_question(uid: str) -> str:
    """Build the user message of a prompt."""
    return _draw_text(f"question/{uid}")


def build_document(query: str) -> str:
    """Build the one document that a search finds."""
    title, _, text = _draw_text(f"document/{query}").partition(" ")
    return f'"{title}"\n{text}'


def _draw_text(seed: str) -> str:
    chance = random.Random(seed)
    words: list[str] = []
    while sum(map(len, words)) + len(words) < _CHARACTERS:
        words.append(chance.choice(_WORDS))
    return " ".join(words)
