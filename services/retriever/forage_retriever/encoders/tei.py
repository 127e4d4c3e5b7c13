"""A client of the text-embeddings-inference protocol: `/info`, `/embed`, `/rerank`.

The protocol is that of huggingface/text-embeddings-inference; other servers implement it too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tenacity import RetryError, Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from forage_runtime.clients.calls import GIVEN_UP, RETRIED, MalformedReplyError, is_transient
from forage_runtime.clients.circuit import Circuit, CircuitOpenError
from forage_runtime.clients.outgoing import MAX_REPLY_BYTES, BlockingClient
from forage_runtime.errors import UnavailableError
from forage_runtime.text.redaction import redact_url

MAX_BATCH = 32
"""Texts in one request where the server states no limit: its default."""

_CONNECT_S = 2.0


@dataclass(frozen=True)
class EndpointInfo:
    """The model that an endpoint serves; `revision` is "" where it is not stated."""

    model: str
    revision: str
    max_batch: int


CALL_S = 10.0
"""Limit of a call with all its attempts: a batch takes an endpoint well under a second, and a search can wait no longer
than `serve.front.SHARD_TIMEOUT_S` for the shard that makes the call."""


class TeiClient:
    """Calls one endpoint from one thread at a time; `timeout_s` is the deadline of a call with all its attempts."""

    def __init__(self, service: str, url: str, timeout_s: float) -> None:
        """`service` names it in errors and metrics."""
        self._url = redact_url(url.rstrip("/"))
        self._timeout_s = timeout_s
        self._circuit = Circuit(service, self._url)
        self._client = BlockingClient(url, MAX_REPLY_BYTES)

    def fetch_info(self, timeout_s: float) -> EndpointInfo:
        """The served model; retries until the endpoint answers or `timeout_s` has passed."""
        reply = self._call("GET", "/info", None, timeout_s, patient=True)
        if not isinstance(reply, dict) or not isinstance(reply.get("model_id"), str):
            raise self._make_malformed_error("/info names no model_id")
        max_batch = reply.get("max_client_batch_size")
        sha = reply.get("model_sha")
        return EndpointInfo(
            reply["model_id"], str(sha or ""), max_batch if isinstance(max_batch, int) and max_batch > 0 else MAX_BATCH
        )

    def embed(self, texts: Sequence[str], normalize: bool) -> NDArray[np.float32]:
        """Vectors [len(texts), dimension] of one to `max_batch` texts."""
        body = {"inputs": list(texts), "normalize": normalize, "truncate": True}
        vectors = self._parse_numbers(self._call("POST", "/embed", body, self._timeout_s), "/embed")
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise self._make_malformed_error(f"/embed gave an array of shape {vectors.shape} for {len(texts)} texts")
        return vectors

    def rerank(self, query: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Scores [len(texts)] of one to `max_batch` texts for a query."""
        reply = self._call("POST", "/rerank", {"query": query, "texts": list(texts), "truncate": True}, self._timeout_s)
        try:
            ranks = {int(rank["index"]): rank["score"] for rank in reply}
            scores = self._parse_numbers([ranks[place] for place in range(len(texts))], "/rerank")
        except (TypeError, KeyError, ValueError):
            raise self._make_malformed_error("/rerank gave no index and score for each text") from None
        return scores

    def _call(self, method: str, path: str, body: Any, timeout_s: float, patient: bool = False) -> Any:
        """Call until there is a reply; an open circuit ends the retries, unless the caller is patient."""
        deadline = time.monotonic() + timeout_s
        try:
            for trial in Retrying(
                stop=stop_before_delay(timeout_s),
                wait=wait_random_exponential(multiplier=0.1, max=2.0),
                retry=retry_if_exception(
                    lambda error: is_transient(error) and (patient or not isinstance(error, CircuitOpenError))
                ),
                before_sleep=lambda _: RETRIED.labels(self._circuit.service).inc(),
            ):
                with trial, self._circuit.attempt():
                    return self._attempt(method, path, body, deadline)
        except (RetryError, CircuitOpenError) as error:
            GIVEN_UP.labels(self._circuit.service).inc()
            cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
            raise UnavailableError(
                f"the {self._circuit.service} at {self._url} gave no answer within {timeout_s:g} s"
                f" ({str(cause) or type(cause).__name__})"
            ) from cause
        raise AssertionError("unreachable: tenacity returns or raises")

    def _attempt(self, method: str, path: str, body: Any, deadline: float) -> Any:
        reply = self._client.request(method, path, body, deadline - time.monotonic(), _CONNECT_S)
        if reply.status != httpx.codes.OK:
            raise httpx.HTTPStatusError(
                f"{path} answers {reply.status}",
                request=httpx.Request(method, self._url + path),
                response=httpx.Response(reply.status, headers=reply.headers),
            )
        try:
            return json.loads(reply.content)
        except (ValueError, RecursionError):
            raise self._make_malformed_error(f"{path} gave no JSON") from None

    def _parse_numbers(self, value: Any, path: str) -> NDArray[np.float32]:
        try:
            numbers = np.asarray(value, np.float32)
        except (ValueError, TypeError, OverflowError):
            raise self._make_malformed_error(f"{path} gave no array of numbers") from None
        if not np.isfinite(numbers).all():
            raise self._make_malformed_error(f"{path} gave numbers that are not finite")
        return numbers

    def _make_malformed_error(self, problem: str) -> MalformedReplyError:
        return MalformedReplyError(f"the {self._circuit.service} at {self._url} is not understood: {problem}")
