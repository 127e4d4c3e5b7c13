"""Invented names. The policy copies them in training, so that it learns copying instead of geography."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

# fmt: off
ONSETS = ["b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z",
          "br", "ch", "dr", "gr", "kh", "kr", "sh", "st", "th", "tr"]
# fmt: on
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "au", "ea", "ia", "oo", "ou"]
CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "d", "ng", "nd", "rt", "st"]


class Namer:
    """Draws names in equal parts from a list of real ones, from a letter model of them, and from syllables."""

    def __init__(self, real: Iterable[str], units: Sequence[str]) -> None:
        """`real`: names to imitate and to reuse in other roles; `units`: last words of currency names."""
        self._real = sorted(set(real))
        self._units = sorted(set(units))
        self._next: dict[str, list[str]] = defaultdict(list)
        for name in self._real:
            for word in name.split(" "):
                letters = f"^^{word.lower()}$"
                for start in range(len(letters) - 2):
                    self._next[letters[start : start + 2]].append(letters[start + 2])

    def draw_name(self, rng: random.Random) -> str:
        """Draw a place's name of one word or, one time in six, of two."""
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(self._real)
        words = 2 if rng.random() < 0.17 else 1
        make = self._imitate if kind < 0.75 else self._join_syllables
        return " ".join(make(rng) for _ in range(words))

    def draw_currency(self, rng: random.Random) -> str:
        """Draw a currency's name: a single word, or an invented word before a unit."""
        if rng.random() < 0.35:
            return self._imitate(rng)
        return f"{self._imitate(rng)} {rng.choice(self._units)}"

    def _imitate(self, rng: random.Random) -> str:
        while True:
            letters = "^^"
            while not letters.endswith("$") and len(letters) < 12:
                letters += rng.choice(self._next[letters[-2:]])
            word = letters.strip("^$")
            if len(word) >= 3 and word.isalpha():
                return word.capitalize()

    @staticmethod
    def _join_syllables(rng: random.Random) -> str:
        parts = rng.choice((2, 2, 3))
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(parts))
        return word[:10].capitalize()
