"""`python build_index.py CORPUS key=value …`: prints the folder of a hybrid index, built if it is not there."""

from __future__ import annotations

import sys

from progress import report_build

from forage_retriever.index.cache import build_cached
from forage_retriever.index.recipe import load_encoder
from forage_runtime.settings import settings_from_arguments


def main() -> None:
    corpus, *overrides = sys.argv[1:]
    settings = settings_from_arguments([f"data.corpus={corpus}", "retriever.mode=hybrid", *overrides])
    with report_build() as report:
        encoder = load_encoder(settings.retriever, building=True)
        folder = build_cached(settings.data.corpus, settings.retriever, encoder, report)
    print(folder)


if __name__ == "__main__":
    main()
