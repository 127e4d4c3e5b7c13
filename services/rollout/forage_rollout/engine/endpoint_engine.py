"""An engine that samples at a remote OpenAI-compatible server, whose weights cannot be replaced."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy, Sampling, TemplateValues
from forage_rollout.engine.chat import render_chat
from forage_rollout.engine.endpoint import Dialect, Endpoint, restore_stop_text
from forage_rollout.engine.engine_counts import EngineCounts, Meter
from forage_rollout.engine.openai import ResponseHead
from forage_rollout.engine.stops import StopTexts
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.files.model_folder import read_end_of_turn
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.chat_template import Chat
from forage_weights.announcement import PolicyError, describe_policy

log = get_logger()


class EndpointEngine:
    """Samples at `rollout.engine.endpoint`, with the tokenizer of `model.path`. `connect` before anything else.

    Attributes:
        serving: names the endpoint; its version is always 0.
        out_of_service: always empty: requests to an unavailable endpoint are retried within their time limit.
        is_starting_again: never: nothing is started here.
        difference: None: no policy is loaded that could be compared.
    """

    out_of_service, is_starting_again, difference = "", False, None

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.model.path
        self._codec = FileTokenizer(self._folder)
        self._endpoint = Endpoint(settings.rollout.engine)
        self._timeout_s = settings.rollout.engine.hang_timeout_s
        self._stops = StopTexts(self._codec.vocabulary)
        self._tokenizer: Any = None
        self._meter = Meter()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._ended = asyncio.Condition()
        self.serving = Policy(uri=settings.rollout.engine.endpoint)

    async def connect(self) -> None:
        """Wait for the endpoint and find its model, however long that takes.

        Raises:
            SettingsError: see `Endpoint.connect`.
        """
        while True:
            try:
                await self._endpoint.connect(self._codec)
                break
            except UnavailableError as error:
                log.warning("waiting_for_endpoint", detail=str(error))
        log.info("endpoint_connected", model=self._endpoint.model, dialect=self._endpoint.dialect)

    @property
    def end_of_turn(self) -> str:
        """The tokenizer's end-of-sequence text."""
        return read_end_of_turn(self._folder)

    @property
    def counts(self) -> EngineCounts:
        """Counts as of now."""
        counts = self._meter.counts
        counts.requests_running, counts.paused = counts.requests_in_flight, int(not self._resumed.is_set())
        return counts

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        """See `chat.render_chat`."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, str(self._folder))
        return render_chat(self._tokenizer, messages, values)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample to a stop text, the end-of-sequence token or `max_tokens`.

        Raises:
            UnavailableError, RefusedError, MalformedReplyError: see `Endpoint.complete`.
        """
        await self._resumed.wait()  # wait: named by the agent, whose trajectory has a time limit
        try:
            with self._meter.track_request():
                if self._endpoint.dialect is Dialect.VLLM:
                    generation = await self._generate(request)
                else:
                    generation = await self._generate_text(request)
        finally:
            async with self._ended:
                self._ended.notify_all()
        self._meter.counts.sampled_tokens += len(generation.token_ids)
        return generation

    def check_sampling(self, sampling: Sampling) -> tuple[str, str]:
        """Nothing is refused in the name of an endpoint, which knows its bounds itself."""
        return "", ""

    async def release(self, affinity: str) -> None:
        """An endpoint holds nothing for an affinity."""

    async def load_policy(self, policy: Policy) -> float:
        """An endpoint's weights cannot be replaced.

        Raises:
            PolicyError: always.
        """
        raise PolicyError(
            f"{describe_policy(policy)} cannot be loaded: {self.serving.uri} serves weights of its own; "
            "unset rollout.engine.endpoint"
        )

    async def pause(self, drain: bool) -> None:
        """Send no requests until `resume`. Requests at the endpoint cannot be held: they end first, drain or not."""
        self._resumed.clear()
        async with self._ended:
            await self._ended.wait_for(
                lambda: not self._meter.counts.requests_in_flight
            )  # wait: requests have time limits

    async def resume(self) -> None:
        """End a pause; without one nothing happens."""
        self._resumed.set()

    @property
    def has_died(self) -> bool:
        """Never: nothing in this process can die."""
        return False

    async def check_health(self) -> None:
        """Nothing in this process can die."""

    async def probe(self) -> None:
        """Nothing in this process can hang."""

    def kill(self) -> None:
        """There are no processes to end."""

    def shutdown(self) -> None:
        """There are no processes to end."""

    async def forward_openai(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """The endpoint's own reply to an OpenAI request; of its models only the one that is used here is listed."""
        async for part in self._endpoint.forward(method, path, body):
            yield part

    async def _generate(self, request: GenerationRequest) -> Generation:
        body = _build_sampling(request) | {
            "prompt": request.token_ids,
            "min_tokens": request.min_tokens,
            "top_k": request.top_k,
            # Without these the defaults of the model's generation_config.json apply.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **self._stops.build_arguments(request.stop),
        }
        reply = await self._endpoint.complete(body, self._timeout_s)
        try:
            choice = reply["choices"][0]
            ids = [int(token) for token in choice["token_ids"]]
            values = (choice.get("logprobs") or {}).get("token_logprobs") or [0.0] * len(ids)
            logprobs = [float(value or 0.0) for value in values]
            if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
                raise ValueError(f"{len(logprobs)} logprobs for {len(ids)} tokens")
            usage = reply.get("usage") or {}
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            hit_length = choice["finish_reason"] == "length"
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MalformedReplyError(f"the endpoint's completion does not have vLLM's format ({error!r})") from None
        self._meter.counts.prompt_tokens += len(request.token_ids)
        self._meter.counts.cached_prompt_tokens += cached
        return Generation(ids, logprobs, hit_length, [(0, 0, 0, len(ids))])

    async def _generate_text(self, request: GenerationRequest) -> Generation:
        for name, value, unset in (("top_k", request.top_k, (-1, 0)), ("min_tokens", request.min_tokens, (0,))):
            if value not in unset:
                raise RefusedError(f"{name} is {value}: {self.serving.uri} supports temperature and top_p only")
        body = _build_sampling(request) | {"prompt": self._codec.decode(request.token_ids)}
        if request.stop:
            body["stop"] = list(request.stop)
        reply = await self._endpoint.complete(body, self._timeout_s)
        try:
            choice = reply["choices"][0]
            text, reason = str(choice["text"]), choice["finish_reason"]
        except (LookupError, TypeError) as error:
            raise MalformedReplyError(f"the endpoint's completion does not have OpenAI's format ({error!r})") from None
        if reason == "stop":
            text = restore_stop_text(text, choice.get("stop_reason"), request.stop)
        ids = self._codec.encode(text)
        self._meter.counts.prompt_tokens += len(request.token_ids)
        return Generation(ids, [0.0] * len(ids), reason == "length", [(0, 0, 0, len(ids))])


async def check_endpoint(settings: Settings) -> None:
    """Return if `rollout.engine.endpoint` can be used, or is not set.

    Raises:
        SettingsError, UnavailableError: see `Endpoint.connect`.
    """
    if settings.rollout.engine.endpoint:
        endpoint = Endpoint(settings.rollout.engine)
        try:
            await endpoint.connect(FileTokenizer(settings.model.path))
        except UnavailableError as error:
            raise SettingsError(f"{error}: start it first, or look at rollout.engine.endpoint") from None
        finally:
            await endpoint.close()


def _build_sampling(request: GenerationRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
    }
    return sampling if request.seed is None else sampling | {"seed": request.seed}
