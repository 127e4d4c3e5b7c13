"""The client of the rollout service's `/v1/completions`: sampled continuations of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from forage_runtime.clients.calls import MalformedReplyError, RefusedError, call
from forage_runtime.clients.circuit import Circuit
from forage_runtime.clients.outgoing import bound_replies
from forage_runtime.errors import SettingsError
from forage_runtime.security.tls import http_scheme, make_client_context
from forage_runtime.security.token_file import HEADER, open_token_file
from forage_runtime.settings import Settings

_TOKEN_SETTING = "rollout.auth_token_file"


@dataclass(frozen=True)
class Continuations:
    """Continuations of one context, one per sample.

    Attributes:
        generated_tokens: sum over all samples.
        cached_tokens: prompt tokens that one sample found in the prefix cache; 0 if the engine does not report it.
    """

    texts: list[str]
    generated_tokens: int
    cached_tokens: int


class CompletionsClient:
    """Samples from the policy that the rollout service serves. Every call raises

    - UnavailableError: no answer within `rollout.trajectory_timeout_s`;
    - SettingsError: the token of `rollout.auth_token_file` is rejected;
    - RefusedError: the service rejects the request; the message has the reason.

    Attributes:
        max_model_len: most tokens of a context and its continuation; None if the service does not report it.
    """

    def __init__(self, settings: Settings) -> None:
        """Connect on the first call.

        Raises:
            SettingsError: the token's file, or one of the certificates, cannot be read.
        """
        address = settings.rollout.http_address
        self._tokens = open_token_file(settings.rollout.auth_token_file, _TOKEN_SETTING)
        self._client = httpx.AsyncClient(
            base_url=f"{http_scheme(settings.tls)}://{address}/v1",
            timeout=None,
            **bound_replies(verify=make_client_context(settings.tls)),
        )
        self._circuit = Circuit("rollout", address)
        self._timeout_s = settings.rollout.trajectory_timeout_s
        self._model = ""
        self.max_model_len: int | None = None

    async def open(self) -> None:
        """Ask which model is served."""
        reply = await self._call("GET", "/models")
        try:
            card = reply["data"][0]
            self._model, self.max_model_len = str(card["id"]), card.get("max_model_len")
        except (LookupError, TypeError, AttributeError) as error:
            raise MalformedReplyError(f"the rollout service lists no model ({error!r})") from error

    async def encode(self, text: str) -> list[int]:
        """Encode a text with the tokenizer of the policy, without special tokens.

        Raises:
            MalformedReplyError: the endpoint does not return token ids; vLLM's does.
        """
        body = {"prompt": text, "max_tokens": 1, "add_special_tokens": False, "return_token_ids": True}
        reply = await self._call("POST", "/completions", {"model": self._model, **body})
        try:
            return [int(token) for token in reply["choices"][0]["prompt_token_ids"]]
        except (LookupError, TypeError, ValueError) as error:
            raise MalformedReplyError(
                f"the rollout service does not return a prompt's token ids ({error!r}): a probe needs vLLM's endpoint"
            ) from error

    async def sample(
        self, token_ids: Sequence[int], samples: int, seed: int, max_tokens: int, stop: str
    ) -> Continuations:
        """Sample continuations at temperature 1, each up to and with its first `stop`; sample i has seed + i."""
        reply = await self._call(
            "POST",
            "/completions",
            {
                "model": self._model,
                "prompt": list(token_ids),
                "n": samples,
                "seed": seed,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                # Without these, the defaults of the model's generation_config.json apply.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "max_tokens": max_tokens,
                "stop": [stop],
                "include_stop_str_in_output": True,
            },
        )
        try:
            texts = [str(choice["text"]) for choice in sorted(reply["choices"], key=lambda choice: choice["index"])]
            usage = reply["usage"]
            generated = int(usage["completion_tokens"])
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MalformedReplyError(f"a completion does not follow the OpenAI API ({error!r})") from error
        if len(texts) != samples:
            raise MalformedReplyError(f"a completion has {len(texts)} choices instead of {samples}")
        return Continuations(texts, generated, cached)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> CompletionsClient:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async def attempt(_: float) -> dict[str, Any]:
            headers = {} if self._tokens is None else {HEADER: f"Bearer {self._tokens.token}"}
            reply = await self._client.request(method, path, json=body, headers=headers)
            reply.raise_for_status()
            content: dict[str, Any] = reply.json()
            return content

        try:
            return await call(self._circuit, attempt, self._timeout_s)
        except httpx.HTTPStatusError as error:
            message = _read_message(error.response)
            if error.response.status_code in (401, 403):
                raise SettingsError(f"{message}: set {_TOKEN_SETTING} to the file that the service reads") from error
            raise RefusedError(message) from error
        except ValueError as error:
            raise MalformedReplyError(f"the rollout service's reply to {path} is not JSON") from error


def _read_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code}: {response.text[:200]}"
