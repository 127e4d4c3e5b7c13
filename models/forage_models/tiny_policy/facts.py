"""Episodes: a question with the passages that answer it, read from a world folder, and renamed on demand."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from forage_models.tiny_policy.names import Namer

_COUNTRY = re.compile(r"The capital of (?P<name>.+) is (?P<capital>.+)\. The currency of .+ is (?P<currency>.+)\.")
_PLACE = re.compile(r"(?P<name>.+) is (?:an?|the) (?P<kind>[a-z ]+) (?:in|of) (?P<country>.+)\.")


@dataclass(frozen=True)
class Document:
    """A passage: title and text without the title line."""

    title: str
    text: str


@dataclass(frozen=True)
class Episode:
    """A question; the document that each hop needs, in order (its title is the query); the accepted answers."""

    question: str
    hops: tuple[Document, ...]
    targets: tuple[str, ...]

    @property
    def asked(self) -> str:
        """Kind of the answer: capital, currency or country."""
        if self.question.startswith(("What is the capital", "Which city")):
            return "capital"
        return "currency" if self.question.startswith(("What is the currency", "Which currency")) else "country"


class World:
    """The corpus by title, and the questions, of a folder that `forage data world` wrote."""

    def __init__(self, folder: Path) -> None:
        """Read the corpus; questions are read a split at a time."""
        self._folder = folder
        self.documents: dict[str, Document] = {}
        with (folder / "corpus.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                title, text = json.loads(line)["contents"].split("\n", 1)
                self.documents[title.strip('"')] = Document(title.strip('"'), text)

    def read_episodes(self, split: str) -> list[Episode]:
        """Read all questions of a split, in the file's order."""
        import pyarrow.parquet as pq

        rows = pq.read_table(self._folder / f"{split}.parquet").to_pylist()
        return [
            Episode(
                question=row["extra_info"]["question"],
                hops=tuple(self.documents[name] for name in row["extra_info"]["entities"]),
                targets=tuple(row["reward_model"]["ground_truth"]["target"]),
            )
            for row in rows
        ]


def rename_entities(episode: Episode, namer: Namer, rng: random.Random) -> Episode:
    """Replace every name by an invented one, the same name by the same everywhere."""
    places, currencies = {episode.hops[0].title}, set()
    for document in episode.hops:
        if found := _COUNTRY.fullmatch(document.text):
            places.update((found["name"], found["capital"]))
            currencies.add(found["currency"])
        elif found := _PLACE.fullmatch(document.text):
            places.update((found["name"], found["country"]))
            if found["kind"] == "currency":
                currencies.add(found["name"])
    new = {old: namer.draw_name(rng) for old in sorted(places - currencies)}
    new.update({old: namer.draw_currency(rng) for old in sorted(currencies)})
    pattern = re.compile("|".join(rf"\b{re.escape(old)}\b" for old in sorted(new, key=len, reverse=True)))

    def swap(text: str) -> str:
        return pattern.sub(lambda match: new[match[0]], text)

    hops = tuple(Document(swap(document.title), swap(document.text)) for document in episode.hops)
    return Episode(swap(episode.question), hops, (swap(episode.targets[0]),))


def draw_distractor(document: Document, namer: Namer, rng: random.Random) -> Document:
    """Draw another passage that a search for `document` could return: of its country, of a similar name, or of any."""
    kind = rng.choice(("city", "city", "province", "district", "region", "municipality"))
    name, country = namer.draw_name(rng), namer.draw_name(rng)
    if document.text.startswith("The capital of"):
        country = document.title
    elif rng.random() < 0.5:
        name = f"{document.title.split(' ')[0]} {name.split(' ')[0]}"
    return Document(name, f"{name} is a {kind} in {country}.")
