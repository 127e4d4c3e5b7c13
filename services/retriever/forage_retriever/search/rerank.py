"""Reranking: a slower and better judge puts the best passages of another searcher in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Histogram

from forage_common.errors import SettingsError, UnavailableError
from forage_common.settings import EncoderPrecision, RetrieverSettings
from forage_common.telemetry.logs import get_logger
from forage_retriever import artifacts
from forage_retriever.corpus.store import Corpus
from forage_retriever.encoders import model_folder
from forage_retriever.encoders.tei import MAX_BATCH, TeiClient
from forage_retriever.hits import Filters, Hit, Searcher

MAX_TOKENS = 512
"""Of a query and a passage together; the longer of both is cut."""

RECIPE = "rerank/1"
SECONDS = Histogram("forage_retriever_rerank_seconds", "Time to judge the passages of a batch of queries")
FAILURES = Counter("forage_retriever_rerank_failures_total", "Queries answered in the order before reranking")


class Reranker(Protocol):
    """Judges passages for a query.

    Attributes:
        digest: SHA-256 of what decides a score.
    """

    digest: str

    def scores(self, query: str, contents: Sequence[str]) -> NDArray[np.float32]:
        """Scores [len(contents)], higher is better."""
        ...


class CrossEncoder:
    """A cross-encoder on ONNX Runtime."""

    def __init__(self, folder: Path, precision: EncoderPrecision, cache_dir: Path, threads: int) -> None:
        """Load the cross-encoder of a Hugging Face folder, exporting it first if that was not done before.

        Raises:
            UserError: the folder is not a cross-encoder's, or the cache cannot be written.
        """
        # Imported here: an endpoint needs no ONNX Runtime.
        from forage_retriever.encoders.onnx_model import EXPORT_RECIPE, INT8_RECIPE, RUN_RECIPE, OnnxModel, exported

        digest = model_folder.digest(folder)
        self.digest = artifacts.digest_of(RECIPE, EXPORT_RECIPE, INT8_RECIPE, RUN_RECIPE, precision, digest)
        graph = exported(folder, digest, cache_dir, precision, threads, "reranker")
        self._model = OnnxModel(graph, model_folder.max_tokens(folder, MAX_TOKENS), threads)

    def scores(self, query: str, contents: Sequence[str]) -> NDArray[np.float32]:
        return self._model.run([(query, text) for text in contents])


class RemoteReranker:
    """An endpoint that speaks the text-embeddings-inference protocol."""

    def __init__(self, url: str, timeout_s: float) -> None:
        # The endpoint is asked only when there is something to judge: a search goes on without it.
        self.digest = artifacts.digest_of(RECIPE, "tei", url)
        self._tei = TeiClient("reranker", url, timeout_s)

    def scores(self, query: str, contents: Sequence[str]) -> NDArray[np.float32]:
        """Scores [len(contents)].

        Raises:
            UnavailableError: no answer within the deadline.
            MalformedReplyError: the answer is not what the protocol says.
        """
        batches = [contents[begin : begin + MAX_BATCH] for begin in range(0, len(contents), MAX_BATCH)]
        return np.concatenate([self._tei.rerank(query, batch) for batch in batches])


def load(settings: RetrieverSettings) -> Reranker | None:
    """The reranker of `settings.rerank`, if it names one.

    Raises:
        SettingsError: it names two.
        UserError: the model's folder is at fault.
    """
    chosen = settings.rerank
    if chosen.url and chosen.model:
        raise SettingsError("retriever.rerank has both a model and a url: give one of them")
    if chosen.url:
        return RemoteReranker(chosen.url, chosen.timeout_s)
    if chosen.model:
        return CrossEncoder(Path(chosen.model), settings.encoder.precision, settings.cache_dir, settings.threads)
    return None


class RerankedSearcher:
    """A searcher whose best `depth` hits are judged again."""

    def __init__(self, searcher: Searcher, corpus: Corpus, reranker: Reranker, depth: int) -> None:
        self._searcher = searcher
        self._corpus = corpus
        self._reranker = reranker
        self._depth = depth

    def search(self, queries: Sequence[str], topk: int, filters: Filters = ()) -> list[list[Hit]]:
        """Judged hits first, best first; then, where `topk` is greater than the depth, the others as they were."""
        found = self._searcher.search(queries, max(topk, self._depth), filters)
        with SECONDS.time():
            try:
                return [self._judged(query, hits)[:topk] for query, hits in zip(queries, found, strict=True)]
            except UnavailableError as error:  # told once, not waited for once a query
                get_logger().warning("reranker_away", reason=str(error))
                FAILURES.inc(sum(1 for hits in found if hits))
                return [hits[:topk] for hits in found]

    def _judged(self, query: str, hits: list[Hit]) -> list[Hit]:
        best, others = hits[: self._depth], hits[self._depth :]
        if not best:
            return hits
        try:
            scores = self._reranker.scores(query, [self._corpus.contents[hit.row] for hit in best])
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model or an endpoint raises, something was found; counted
            get_logger().warning("rerank_failed", reason=str(error))
            FAILURES.inc()
            return hits
        order = np.argsort(-scores, kind="stable")
        judged = [Hit(best[place].row, float(scores[place])) for place in order]
        # Scores of two kinds: those of the others are moved below, with their distances kept.
        return judged + [Hit(hit.row, judged[-1].score + hit.score - others[0].score) for hit in others]
