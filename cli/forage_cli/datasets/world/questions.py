"""Questions over the facts, split by country: no name occurs both in test and in training questions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from forage_cli.datasets.world.facts import Country, Facts, Place, is_plain, normalize_name

SPLITS = ("train", "validation", "test")
TEST_COUNTRIES = 26
VALIDATION_COUNTRIES = 14
LIMITS = {"train": 20_000, "validation": 600, "test": 1_200}
"""Largest number of questions of a split (sampled from all that its countries allow)."""

ONE_HOP = {
    "capital": ("What is the capital of {x}?", "Which city is the capital of {x}?"),
    "currency": ("What is the currency of {x}?", "Which currency is used in {x}?"),
    "of_city": ("In which country is the city of {x}?", "Which country does the city of {x} lie in?"),
    "of_capital": ("Which country has the capital {x}?", "What is the country whose capital is {x}?"),
    "of_currency": ("Which country has the currency {x}?", "What is the country whose currency is the {x}?"),
    "of_region": ("In which country is the {kind} of {x}?", "Which country does the {kind} of {x} lie in?"),
}
TWO_HOP = {
    ("capital", "city"): (
        "What is the capital of the country where the city of {x} lies?",
        "Which city is the capital of the country in which {x} lies?",
    ),
    ("currency", "city"): (
        "What is the currency of the country where the city of {x} lies?",
        "Which currency is used in the country in which {x} lies?",
    ),
    ("currency", "capital"): (
        "What is the currency of the country whose capital is {x}?",
        "Which currency is used in the country with the capital {x}?",
    ),
    ("capital", "currency"): (
        "What is the capital of the country whose currency is the {x}?",
        "Which city is the capital of the country with the currency {x}?",
    ),
    ("capital", "region"): (
        "What is the capital of the country where the {kind} of {x} lies?",
        "Which city is the capital of the country with the {kind} of {x}?",
    ),
    ("currency", "region"): (
        "What is the currency of the country where the {kind} of {x} lies?",
        "Which currency is used in the country with the {kind} of {x}?",
    ),
}


@dataclass(frozen=True)
class WorldQuestion:
    """A question with its accepted answers. `entities`: the names to search for, one per hop."""

    split: str
    text: str
    targets: tuple[str, ...]
    entities: tuple[str, ...]
    country: str

    @property
    def hops(self) -> int:
        """Number of passages that an answer needs."""
        return len(self.entities)


def split_countries(facts: Facts, seed: int) -> dict[str, str]:
    """Assign each country code a split. Only countries with all kinds of questions are held out."""
    rng = random.Random(f"countries-{seed}")
    rich = [c.code for c in facts.countries.values() if _is_askable(c) and c.own_currency]
    held = rng.sample(rich, TEST_COUNTRIES + VALIDATION_COUNTRIES)
    splits = dict.fromkeys(facts.countries, "train")
    splits.update(dict.fromkeys(held[:TEST_COUNTRIES], "test"))
    splits.update(dict.fromkeys(held[TEST_COUNTRIES:], "validation"))
    return splits


def make_questions(facts: Facts, seed: int) -> dict[str, list[WorldQuestion]]:
    """Make every split's questions, shuffled in an order that depends on `seed` alone."""
    splits = split_countries(facts, seed)
    rng = random.Random(f"questions-{seed}")
    by_split: dict[str, list[WorldQuestion]] = {split: [] for split in SPLITS}
    for country in facts.countries.values():
        if _is_askable(country):
            by_split[splits[country.code]] += _ask_about_country(country, splits[country.code], rng)
    for place in facts.places:
        country = facts.countries[place.country]
        if _is_askable(country):
            by_split[splits[country.code]] += _ask_about_place(place, country, splits[country.code], rng)
    for split, found in by_split.items():
        rng.shuffle(found)
        by_split[split] = found[: LIMITS[split]]
    return by_split


def _is_askable(country: Country) -> bool:
    return is_plain(country.name)


def _reveals_answer(name: str, answer: str) -> bool:
    """Whether one of the two names contains the other as words, so that the question would contain its answer."""
    mine, other = f" {normalize_name(name)} ", f" {normalize_name(answer)} "
    return mine in other or other in mine


def _find_targets(country: Country, asked: str) -> tuple[str, ...] | None:
    """Return the accepted answers; None where several countries share it, or the question would contain it."""
    if asked == "capital":
        plain = is_plain(country.capital) and not _reveals_answer(country.name, country.capital)
        return (country.capital,) if plain else None
    if country.own_currency and is_plain(country.currency) and not _reveals_answer(country.name, country.currency):
        return (country.currency, *country.currency_aliases)
    return None


def _ask_about_country(country: Country, split: str, rng: random.Random) -> Iterator[WorldQuestion]:
    for asked in ("capital", "currency"):
        targets = _find_targets(country, asked)
        if targets is not None:
            text = rng.choice(ONE_HOP[asked]).format(x=country.name)
            yield WorldQuestion(split, text, targets, (country.name,), country.code)


def _ask_about_place(place: Place, country: Country, split: str, rng: random.Random) -> Iterator[WorldQuestion]:
    role = place.kind if place.kind in ("city", "capital", "currency") else "region"
    words = {"x": place.name, "kind": place.kind}
    if _reveals_answer(place.name, country.name):
        return
    text = rng.choice(ONE_HOP[f"of_{role}"]).format(**words)
    yield WorldQuestion(split, text, (country.name, *country.aliases), (place.name,), country.code)
    for asked in ("capital", "currency"):
        targets = _find_targets(country, asked)
        if asked != role and targets is not None and not _reveals_answer(place.name, targets[0]):
            text = rng.choice(TWO_HOP[asked, role]).format(**words)
            yield WorldQuestion(split, text, targets, (place.name, country.name), country.code)
