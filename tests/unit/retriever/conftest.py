"""A small corpus, and an index over it."""

from retriever_fixtures import corpus_file, loaded, texts

__all__ = ["corpus_file", "loaded", "texts"]
