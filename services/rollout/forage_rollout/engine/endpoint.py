"""A remote OpenAI-compatible server: which model it serves, how it can be asked, and what its errors mean."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Any

import httpx

from forage_common.clients.auth import HEADER, TokenFile
from forage_common.clients.calls import MalformedReplyError, RefusedError, call
from forage_common.clients.circuit import Circuit
from forage_common.errors import SettingsError, UnavailableError
from forage_common.settings import EngineSettings
from forage_rollout.engine.openai import PATHS, Head
from forage_rollout.loop.tokens import TokenCodec

START_S = 30.0
_CONNECT_S = 5.0
_PREFIX = "/v1"
_PROBE = "Where is Ulan Bator? <search> café, 42 </search>\n\n<answer> 東 </answer>"
_HINTS = {401: "endpoint_token_file", 403: "endpoint_token_file", 404: "endpoint and rollout.engine.endpoint_model"}
_TOLD = ("content-type", "retry-after")


class Dialect(StrEnum):
    """How a server is asked for a completion."""

    VLLM = "vllm"
    """Token ids in and out, as sampled."""

    TEXT = "text"
    """What every server has: texts, without the stop text that ended them."""


class Endpoint:
    """The server at `rollout.engine.endpoint`; `connect` before anything else.

    Attributes:
        model: its name there.
        dialect: what the server understands.

    Raises:
        SettingsError: the token's file cannot be read.
    """

    def __init__(self, settings: EngineSettings) -> None:
        file = settings.endpoint_token_file
        self._token = None if file is None else TokenFile(file, "rollout.engine.endpoint_token_file")
        self._settings = settings
        self._circuit = Circuit("endpoint", settings.endpoint)
        self._http = httpx.AsyncClient(
            base_url=settings.endpoint,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # `call` sets the deadline
            limits=httpx.Limits(max_connections=settings.max_num_seqs, max_keepalive_connections=settings.max_num_seqs),
            trust_env=False,
        )
        self._card: dict[str, Any] = {}
        self.model = ""
        self.dialect = Dialect.TEXT

    async def connect(self, codec: TokenCodec) -> None:
        """Learn which model is served and how to ask for it.

        Args:
            codec: the tokenizer of `model.path`, which must be the model's.

        Raises:
            SettingsError: the server refuses, serves no such model, or one with another tokenizer or a shorter context.
            UnavailableError: no answer within `START_S`.
        """
        try:
            self._card = await self._find_model()
            self.model = str(self._card["id"])
            self.dialect = await self._find_dialect(codec)
        except (RefusedError, MalformedReplyError) as error:
            raise SettingsError(str(error)) from None

    async def complete(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to a request for one completion of the model.

        Raises:
            UnavailableError: no answer within the time, whatever was tried.
            RefusedError: the server will not serve this request; says why.
            MalformedReplyError: the reply is not of OpenAI's format.
        """
        try:
            reply = await self._reply("POST", "/completions", {"model": self.model, **body}, timeout_s)
        except httpx.HTTPStatusError as error:
            raise self._refused(error) from None
        if not isinstance(reply.get("choices"), list) or len(reply["choices"]) != 1:
            raise self._malformed("expected one choice")
        return reply

    async def pass_on(self, method: str, path: str, body: bytes) -> AsyncGenerator[Head | bytes, None]:
        """Another's request as it is, under our token: (status, headers), then the body in parts.

        Raises:
            UnavailableError: the server cannot be reached, or breaks off.
        """
        if path == "/v1/models":
            yield 200, [("content-type", "application/json")]
            yield json.dumps({"object": "list", "data": [self._card]}).encode()
            return
        assert PATHS[path] == method
        headers = {"content-type": "application/json"} | self._authorization()
        try:
            async with self._http.stream(method, path.removeprefix(_PREFIX), content=body, headers=headers) as reply:
                yield reply.status_code, [(name, reply.headers[name]) for name in _TOLD if name in reply.headers]
                async for part in reply.aiter_bytes():
                    yield part
        except httpx.TransportError as error:
            raise UnavailableError(f"the endpoint at {self._circuit.address} cannot be reached ({error!r})") from None

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def _find_model(self) -> dict[str, Any]:
        wanted = self._settings.endpoint_model
        try:
            cards = (await self._reply("GET", "/models", None, START_S))["data"]
            served = {str(card["id"]): card for card in cards}
        except httpx.HTTPStatusError as error:
            if wanted and error.response.status_code == 404:  # not every server lists its models
                return {"id": wanted, "object": "model"}
            raise self._refused(error) from None
        except (LookupError, TypeError, AttributeError) as error:
            raise self._malformed(f"/models: {error!r}") from None
        name = wanted or (next(iter(served)) if len(served) == 1 else "")
        if name not in served:
            raise SettingsError(
                f"rollout.engine.endpoint_model is {wanted!r}: {self._circuit.address} serves "
                f"{', '.join(sorted(served)) or 'no model'}; give one of these"
            )
        longest = served[name].get("max_model_len")
        if isinstance(longest, int) and longest < self._settings.max_model_len:
            raise SettingsError(
                f"rollout.engine.max_model_len is {self._settings.max_model_len}: {name} at {self._circuit.address} "
                f"takes {longest} tokens; make it smaller, with rollout.max_prompt_length"
            )
        return dict(served[name])

    async def _find_dialect(self, codec: TokenCodec) -> Dialect:
        """vLLM says how it reads a prompt; others ignore the question, or refuse it."""
        plain = {"model": self.model, "prompt": _PROBE, "max_tokens": 1, "temperature": 0.0}
        asked = plain | {"add_special_tokens": False, "return_token_ids": True}
        try:
            (choice,) = (await self._reply("POST", "/completions", asked, START_S))["choices"]
            read = choice.get("prompt_token_ids")
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (400, 422):
                raise self._refused(error) from None
            await self.complete(plain, START_S)
            return Dialect.TEXT
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._malformed(repr(error)) from None
        if read is None:
            return Dialect.TEXT
        if read != codec.encode(_PROBE):
            raise SettingsError(
                f"{self.model} at {self._circuit.address} has another tokenizer than model.path: set model.path to a "
                "folder with the configuration and the tokenizer of that model"
            )
        return Dialect.VLLM

    async def _reply(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        async def attempt() -> httpx.Response:
            reply = await self._http.request(method, path, json=body, headers=self._authorization())
            return reply.raise_for_status()

        try:
            found = (await call(self._circuit, attempt, timeout_s)).json()
        except (httpx.DecodingError, ValueError, RecursionError) as error:
            raise self._malformed(repr(error)) from None
        if not isinstance(found, dict):
            raise self._malformed("expected an object")
        return found

    def _authorization(self) -> dict[str, str]:
        return {} if self._token is None else {HEADER: f"Bearer {self._token.token}"}

    def _refused(self, error: httpx.HTTPStatusError) -> RefusedError:
        status = error.response.status_code
        hint = f"; look at rollout.engine.{_HINTS[status]}" if status in _HINTS else ""
        text = " ".join(error.response.text.split())[:300]
        return RefusedError(f"the endpoint at {self._circuit.address} refused a request ({status}): {text}{hint}")

    def _malformed(self, reason: str) -> MalformedReplyError:
        return MalformedReplyError(
            f"the answer from {self._circuit.address} is not of OpenAI's format ({reason}): is it such a server?"
        )


def with_stop(text: str, reason: object, stops: Sequence[str]) -> str:
    """A text with the stop text that a server has cut off its end.

    Args:
        reason: the stop text, where the server says; else it is the one that closes the tag which the text leaves open.
    """
    if any(stop in text for stop in stops):
        return text
    if reason in stops:
        return f"{text}{reason}"
    opened = {stop: text.rfind(stop.replace("</", "<", 1)) for stop in stops if stop.startswith("</")}
    last = max(opened, key=lambda stop: opened[stop], default="")
    return text + last if opened.get(last, -1) >= 0 else text
