"""Searchers: BM25, dense, hybrid, reranked."""
