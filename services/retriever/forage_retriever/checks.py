"""The checks of the retriever before it starts: before a corpus is read and the files of an index are compared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from forage_retriever.devices import find_gpus
from forage_retriever.encoders import factory
from forage_retriever.index.load import read_fitting_manifest
from forage_retriever.search.rerank import check_reranker
from forage_runtime.problems import Check, list_common_checks, name_setting, run_checks
from forage_runtime.settings import RetrievalMode, RetrieverSettings, Settings


def list_checks(settings: Settings) -> Iterator[Check]:
    """List the checks of the settings and of the files that they name; no other server is called."""
    own = settings.retriever
    yield from list_common_checks(settings, "retriever", "retriever")
    yield partial(find_gpus, own)
    yield name_setting("retriever.rerank.model", partial(check_reranker, own.rerank))
    if own.shards:
        return  # they hold the index, and encode queries
    if own.index is not None:
        yield name_setting("retriever.index", partial(read_fitting_manifest, own.index, own))
    if own.mode is not RetrievalMode.BM25:
        yield partial(factory.choose_gpu_precision, own)
        yield name_setting("retriever.encoder.model", partial(_check_encoder, own))


def _check_encoder(own: RetrieverSettings) -> None:
    """Its files and convention, and that FAISS can make an index of its vectors; an endpoint's are not known."""
    dimension = factory.find_dimension(own.encoder)
    if dimension is not None and own.index is None:
        from forage_retriever.search.faiss_build import create_index  # FAISS takes a while to import

        create_index(own.faiss_factory, dimension)


if __name__ == "__main__":
    run_checks(list_checks)
