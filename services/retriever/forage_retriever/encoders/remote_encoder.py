"""An encoder behind an endpoint of the text-embeddings-inference protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httpx

from forage_retriever import artifacts
from forage_retriever.encoders import conventions
from forage_retriever.encoders.encoder import Vectors, encode_in_batches
from forage_retriever.encoders.tei import CALL_S, TeiClient
from forage_runtime.clients.calls import MalformedReplyError
from forage_runtime.errors import UnavailableError, UserError

RECIPE = "tei/1"
START_S = 120.0
"""Limit of the wait for the endpoint at start: it may be loading its model."""


class RemoteEncoder:
    """A remote encoder; see `Encoder`. It adds prefixes; the endpoint pools and truncates."""

    precision = device = "remote"
    family = ""

    def __init__(self, url: str, convention: str, timeout_s: float = CALL_S, start_s: float = START_S) -> None:
        """Ask the endpoint which model it serves.

        Raises:
            UserError: the endpoint does not answer, or is not an encoder.
            SettingsError: the convention is unknown.
        """
        self._tei = TeiClient("encoder", url, timeout_s)
        chosen = None if convention == conventions.AUTO else conventions.find_convention(convention)
        try:
            served = self._tei.fetch_info(start_s)
            self.model = served.model
            self.convention = chosen or conventions.infer_from_model(served.model)
            self._batch = served.max_batch
            self.dimension = self._tei.embed(["dimension"], self.convention.normalize).shape[1]
        except (UnavailableError, MalformedReplyError, httpx.HTTPError) as error:
            raise UserError(
                f"retriever.encoder.model {url} serves no encoder ({error}): start text-embeddings-inference there"
            ) from None
        self.digest = artifacts.compute_digest(RECIPE, self.convention.compute_digest(served.model, served.revision))

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Vectors [len(texts), dimension].

        Raises:
            UnavailableError: no answer within the deadline.
            MalformedReplyError: the reply violates the protocol, or its dimension has changed.
        """
        return self._encode_texts(texts, self.convention.query_prefix, lambda done: None)

    def encode_passages(self, texts: Sequence[str], progress: Callable[[int], None]) -> Vectors:
        return self._encode_texts(texts, self.convention.passage_prefix, progress)

    def _encode_texts(self, texts: Sequence[str], prefix: str, progress: Callable[[int], None]) -> Vectors:
        return encode_in_batches(self._embed, texts, prefix, self.dimension, self._batch, progress)

    def _embed(self, batch: Sequence[str]) -> Vectors:
        # The protocol refuses a text without a character; a blank has the vector of the empty text.
        vectors = self._tei.embed([text or " " for text in batch], self.convention.normalize)
        if vectors.shape[1] != self.dimension:
            raise MalformedReplyError(
                f"the encoder {self.model} gave vectors of {vectors.shape[1]} numbers, no longer {self.dimension}:"
                " restart the retriever if the endpoint's model was changed"
            )
        return vectors
