"""Reranking: a slower, more accurate model reorders the best passages of another searcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Histogram

from forage_retriever import artifacts
from forage_retriever.corpus.store import Corpus
from forage_retriever.devices import count_threads
from forage_retriever.encoders import model_folder
from forage_retriever.encoders.factory import choose_cpu_precision
from forage_retriever.encoders.tei import CALL_S, MAX_BATCH, TeiClient
from forage_retriever.hits import Filters, Hit, Searcher
from forage_runtime.errors import UnavailableError
from forage_runtime.settings import EncoderPrecision, RerankSettings, RetrieverSettings
from forage_runtime.telemetry.logs import get_logger

MAX_TOKENS = 512
"""Limit of a query and a passage together; the longer one is truncated."""

RECIPE = "rerank/1"
SECONDS = Histogram("forage_retriever_rerank_seconds", "Time to score the passages of a batch of queries")
FAILURES = Counter("forage_retriever_rerank_failures_total", "Queries answered in the order before reranking")


class Reranker(Protocol):
    """Scores passages for a query.

    Attributes:
        digest: SHA-256 of all that decides a score.
    """

    digest: str

    def score_passages(self, query: str, contents: Sequence[str]) -> NDArray[np.float32]:
        """Scores [len(contents)]; higher is better."""
        ...


class CrossEncoder:
    """A cross-encoder on ONNX Runtime."""

    def __init__(self, folder: Path, precision: EncoderPrecision, cache_dir: Path, threads: int) -> None:
        """Load the cross-encoder of a Hugging Face folder, exporting it first if it was not exported before.

        Raises:
            UserError: the folder is not a cross-encoder, or the cache cannot be written.
        """
        # Imported here: an endpoint needs no ONNX Runtime.
        from forage_retriever.encoders.onnx_model import EXPORT_RECIPE, INT8_RECIPE, RUN_RECIPE, OnnxModel, export_model

        digest = model_folder.digest_model(folder)
        self.digest = artifacts.compute_digest(RECIPE, EXPORT_RECIPE, INT8_RECIPE, RUN_RECIPE, precision, digest)
        graph = export_model(folder, digest, cache_dir, precision, threads, "reranker")
        self._model = OnnxModel(graph, model_folder.limit_max_tokens(folder, MAX_TOKENS), threads)

    def score_passages(self, query: str, contents: Sequence[str]) -> NDArray[np.float32]:
        return self._model.run([(query, text) for text in contents])


class RemoteReranker:
    """A reranker behind an endpoint of the text-embeddings-inference protocol."""

    def __init__(self, url: str, timeout_s: float = CALL_S) -> None:
        # The endpoint is not called at start: searches work without it.
        self.digest = artifacts.compute_digest(RECIPE, "tei", url)
        self._tei = TeiClient("reranker", url, timeout_s)

    def score_passages(self, query: str, contents: Sequence[str]) -> NDArray[np.float32]:
        """Scores [len(contents)].

        Raises:
            UnavailableError: no answer within the deadline.
            MalformedReplyError: the reply violates the protocol.
        """
        batches = [contents[begin : begin + MAX_BATCH] for begin in range(0, len(contents), MAX_BATCH)]
        return np.concatenate([self._tei.rerank(query, batch) for batch in batches])


def check_reranker(chosen: RerankSettings) -> None:
    """Check that the folder of a reranker has the files.

    Raises:
        UserError: it has not.
    """
    if chosen.model and not chosen.url:
        model_folder.list_files(Path(chosen.model))


def load_reranker(settings: RetrieverSettings) -> Reranker | None:
    """The reranker of `settings.rerank`; None where it names none.

    Raises:
        UserError: as `check_reranker`, or the model's folder is at fault.
    """
    chosen = settings.rerank
    check_reranker(chosen)
    if chosen.url:
        return RemoteReranker(chosen.url)
    if chosen.model:
        precision = choose_cpu_precision(settings.encoder.precision)
        return CrossEncoder(Path(chosen.model), precision, settings.cache_dir, count_threads(settings))
    return None


class RerankedSearcher:
    """Reranks the best `depth` hits of another searcher."""

    def __init__(self, searcher: Searcher, corpus: Corpus, reranker: Reranker, depth: int) -> None:
        self._searcher = searcher
        self._corpus = corpus
        self._reranker = reranker
        self._depth = depth

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """Reranked hits, best first; then, where `topk` is greater than the depth, the others in their order."""
        rankings = self._searcher.search(queries, max(topk, self._depth), filters)
        with SECONDS.time():
            try:
                return [self._rerank_hits(query, hits)[:topk] for query, hits in zip(queries, rankings, strict=True)]
            except UnavailableError as error:  # wait and log once for the batch, not once per query
                get_logger().warning("reranker_unavailable", reason=str(error))
                FAILURES.inc(sum(1 for hits in rankings if hits))
                return [hits[:topk] for hits in rankings]

    def _rerank_hits(self, query: str, hits: list[Hit]) -> list[Hit]:
        best, others = hits[: self._depth], hits[self._depth :]
        if not best:
            return hits
        try:
            scores = self._reranker.score_passages(query, [self._corpus.contents[hit.row] for hit in best])
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - a failing reranker must not cost the search its hits; counted
            get_logger().warning("rerank_failed", reason=str(error))
            FAILURES.inc()
            return hits
        order = np.argsort(-scores, kind="stable")
        reranked = [Hit(best[place].row, float(scores[place])) for place in order]
        # The two kinds of scores do not compare: those of the others are shifted below, with their differences kept.
        return reranked + [Hit(hit.row, reranked[-1].score + hit.score - others[0].score) for hit in others]
