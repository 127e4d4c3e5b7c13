"""Client of a remote OpenAI-compatible server: its model, its dialect, and what its errors mean for the settings."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Any

import httpx

from forage_rollout.engine.openai import PATHS, ResponseHead
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.calls import MalformedReplyError, RefusedError, call
from forage_runtime.clients.circuit import Circuit
from forage_runtime.clients.concurrency import Slots
from forage_runtime.clients.outgoing import bound_replies
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.security.token_file import HEADER, TokenFile
from forage_runtime.settings import EngineSettings
from forage_runtime.telemetry.waits import waiting

START_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_PREFIX = "/v1"
_PROBE = "Where is Ulan Bator? <search> café, 42 </search>\n\n<answer> 東 </answer>"
_HINTS = {401: "endpoint_token_file", 403: "endpoint_token_file", 404: "endpoint and rollout.engine.endpoint_model"}
_FORWARDED_HEADERS = ("content-type", "retry-after")


class Dialect(StrEnum):
    """The form of requests and replies that a server supports."""

    VLLM = "vllm"
    """Token ids in, sampled token ids with log-probabilities out."""

    TEXT = "text"
    """Texts, which every server supports; replies leave out the stop text that ended them."""


class Endpoint:
    """The server at `rollout.engine.endpoint`; `connect` before anything else.

    Attributes:
        model: its name at the server.
        dialect: the best one that the server supports.

    Raises:
        SettingsError: the token file cannot be read.
    """

    def __init__(self, settings: EngineSettings) -> None:
        file = settings.endpoint_token_file
        self._token = None if file is None else TokenFile(file, "rollout.engine.endpoint_token_file")
        self._settings = settings
        self._circuit = Circuit("endpoint", settings.endpoint)
        self._slots = Slots("endpoint", settings.max_num_seqs)
        self._http = httpx.AsyncClient(
            base_url=settings.endpoint,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),  # `call` sets the deadline
            **bound_replies(),
        )
        self._card: dict[str, Any] = {}
        self.model = ""
        self.dialect = Dialect.TEXT

    async def connect(self, codec: FileTokenizer) -> None:
        """Find the served model and the dialect of the server.

        Args:
            codec: the tokenizer of `model.path`, which must be the model's.

        Raises:
            SettingsError: the server rejects requests, does not serve the model, or serves one with another tokenizer
                or a shorter context.
            UnavailableError: no answer within `START_TIMEOUT_S`.
        """
        try:
            self._card = await self._find_model()
            self.model = str(self._card["id"])
            self.dialect = await self._find_dialect(codec)
        except (RefusedError, MalformedReplyError) as error:
            raise SettingsError(str(error)) from None

    async def complete(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Request one completion of the model.

        Raises:
            UnavailableError: no answer within the time, despite retries.
            RefusedError: the server rejects the request; the message says why.
            MalformedReplyError: the reply does not have OpenAI's format.
        """
        try:
            reply = await self._request_json("POST", "/completions", {"model": self.model, **body}, timeout_s)
        except httpx.HTTPStatusError as error:
            raise self._build_refusal(error) from None
        if not isinstance(reply.get("choices"), list) or len(reply["choices"]) != 1:
            raise self._build_malformed("expected one choice")
        return reply

    async def forward(self, method: str, path: str, body: bytes) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Forward a caller's request with our token; yields (status, headers), then the body in parts.

        Raises:
            UnavailableError: the server cannot be reached, or ends the reply early.
        """
        if path == "/v1/models":
            yield 200, [("content-type", "application/json")]
            yield json.dumps({"object": "list", "data": [self._card]}).encode()
            return
        assert PATHS[path] == method
        headers = {"content-type": "application/json"} | self._build_headers()
        try:
            with waiting("answers", on="endpoint", limit_s=None, why_unlimited="its caller may leave") as wait:
                async with (
                    self._slots.take(wait),
                    self._http.stream(method, path.removeprefix(_PREFIX), content=body, headers=headers) as reply,
                ):
                    yield (
                        reply.status_code,
                        [(name, reply.headers[name]) for name in _FORWARDED_HEADERS if name in reply.headers],
                    )
                    async for part in reply.aiter_bytes():
                        yield part
        except httpx.TransportError as error:
            raise UnavailableError(f"the endpoint at {self._circuit.address} cannot be reached ({error!r})") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _find_model(self) -> dict[str, Any]:
        wanted = self._settings.endpoint_model
        try:
            cards = (await self._request_json("GET", "/models", None, START_TIMEOUT_S))["data"]
            served = {str(card["id"]): card for card in cards}
        except httpx.HTTPStatusError as error:
            if wanted and error.response.status_code == 404:  # not every server lists its models
                return {"id": wanted, "object": "model"}
            raise self._build_refusal(error) from None
        except (LookupError, TypeError, AttributeError) as error:
            raise self._build_malformed(f"/models: {error!r}") from None
        name = wanted or (next(iter(served)) if len(served) == 1 else "")
        if name not in served:
            raise SettingsError(
                f"rollout.engine.endpoint_model is {wanted!r}: {self._circuit.address} serves "
                f"{', '.join(sorted(served)) or 'no model'}; give one of these"
            )
        max_length = served[name].get("max_model_len")
        if isinstance(max_length, int) and max_length < self._settings.max_model_len:
            raise SettingsError(
                f"rollout.engine.max_model_len is {self._settings.max_model_len}: {name} at {self._circuit.address} "
                f"takes {max_length} tokens; make it smaller, with rollout.max_prompt_length"
            )
        return dict(served[name])

    async def _find_dialect(self, codec: FileTokenizer) -> Dialect:
        """Request one token and the prompt's token ids: vLLM returns them, other servers ignore or reject that."""
        plain = {"model": self.model, "prompt": _PROBE, "max_tokens": 1, "temperature": 0.0}
        extended = plain | {"add_special_tokens": False, "return_token_ids": True}
        try:
            (choice,) = (await self._request_json("POST", "/completions", extended, START_TIMEOUT_S))["choices"]
            token_ids = choice.get("prompt_token_ids")
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (400, 422):
                raise self._build_refusal(error) from None
            await self.complete(plain, START_TIMEOUT_S)
            return Dialect.TEXT
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._build_malformed(repr(error)) from None
        if token_ids is None:
            return Dialect.TEXT
        if token_ids != codec.encode(_PROBE):
            raise SettingsError(
                f"{self.model} at {self._circuit.address} has another tokenizer than model.path: set model.path to a "
                "folder with the configuration and the tokenizer of that model"
            )
        return Dialect.VLLM

    async def _request_json(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        async def attempt(_: float) -> httpx.Response:
            response = await self._http.request(method, path, json=body, headers=self._build_headers())
            return response.raise_for_status()

        try:
            reply = (await call(self._circuit, attempt, timeout_s, self._slots)).json()
        except (httpx.DecodingError, ValueError, RecursionError) as error:
            raise self._build_malformed(repr(error)) from None
        if not isinstance(reply, dict):
            raise self._build_malformed("expected an object")
        return reply

    def _build_headers(self) -> dict[str, str]:
        return {} if self._token is None else {HEADER: f"Bearer {self._token.token}"}

    def _build_refusal(self, error: httpx.HTTPStatusError) -> RefusedError:
        status = error.response.status_code
        hint = f"; look at rollout.engine.{_HINTS[status]}" if status in _HINTS else ""
        text = " ".join(error.response.text.split())[:300]
        return RefusedError(f"the endpoint at {self._circuit.address} refused a request ({status}): {text}{hint}")

    def _build_malformed(self, reason: str) -> MalformedReplyError:
        return MalformedReplyError(
            f"the answer from {self._circuit.address} does not have OpenAI's format ({reason}): "
            "is it an OpenAI-compatible server?"
        )


def restore_stop_text(text: str, reason: object, stops: Sequence[str]) -> str:
    """Append the stop text that a server has removed from the end of a completion.

    Args:
        reason: the stop text, where the server returns it; else the one that closes the last open tag is appended.
    """
    if any(stop in text for stop in stops):
        return text
    if reason in stops:
        return f"{text}{reason}"
    opened = {stop: text.rfind(stop.replace("</", "<", 1)) for stop in stops if stop.startswith("</")}
    last = max(opened, key=lambda stop: opened[stop], default="")
    return text + last if opened.get(last, -1) >= 0 else text
