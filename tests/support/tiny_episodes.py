"""An episode of the tiny policy's demonstrations, and the names and guesses that vary it."""

from __future__ import annotations

from forage_models.tiny_policy.facts import Document, Episode
from forage_models.tiny_policy.names import Namer

TWO_HOPS = Episode(
    question="What is the currency of the country where the city of Erdenet lies?",
    hops=(
        Document("Erdenet", "Erdenet is a city in Mongolia."),
        Document("Mongolia", "The capital of Mongolia is Ulaanbaatar. The currency of Mongolia is Tugrik."),
    ),
    targets=("Tugrik", "Mongolian Tugrik"),
)
NAMER = Namer(["Ann Arbor", "Bergen", "Cotonou", "Porto-Novo", "Erdenet"], ["Franc", "Peso"])
GUESSES = {"currency": ["Lek", "Tugrik"], "capital": ["Oslo"], "country": ["Norway"]}
