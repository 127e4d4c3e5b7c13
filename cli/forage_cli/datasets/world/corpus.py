"""Passages: one short text per country or place, titled with its name, one sentence per fact."""

from __future__ import annotations

from forage_cli.datasets.world.facts import Country, Facts, Place


def make_passages(facts: Facts) -> list[dict[str, str]]:
    """Make the whole corpus in the retriever's layout, countries first; ids depend on the tables alone.

    The contents of a passage are the quoted title, a newline, and the text.
    """
    described = [(c.name, _describe_country(c)) for c in facts.countries.values()]
    described += [(p.name, _describe_place(p, facts.countries[p.country])) for p in facts.places]
    return [{"id": f"world-{n:05d}", "contents": f'"{title}"\n{text}'} for n, (title, text) in enumerate(described)]


def _describe_country(country: Country) -> str:
    # The name is in both sentences, so that a search for it ranks this passage before those of its cities.
    name = country.name
    return f"The capital of {name} is {country.capital}. The currency of {name} is {country.currency}."


def _describe_place(place: Place, country: Country) -> str:
    if place.kind == "capital":
        return f"{place.name} is the capital of {country.name}."
    if place.kind == "currency":
        return f"{place.name} is the currency of {country.name}."
    article = "an" if place.kind[0] in "aeiou" else "a"
    return f"{place.name} is {article} {place.kind} in {country.name}."
