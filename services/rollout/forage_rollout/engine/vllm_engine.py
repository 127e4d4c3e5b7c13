"""The engine on vLLM's AsyncLLM: samples tokens, loads policies in place, reports the policy that it serves."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from typing import Any

from forage_proto.v1.trajectory_pb2 import Policy, Sampling, TemplateValues
from forage_rollout.engine.chat import render_chat
from forage_rollout.engine.engine_counts import EngineCounts, Meter
from forage_rollout.engine.instance import Instance
from forage_rollout.engine.leases import Leases
from forage_rollout.engine.policy_loader import PolicyLoader
from forage_rollout.engine.sampling_parameters import build_parameters, find_refusal
from forage_rollout.engine.stops import StopTexts
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.text.chat_template import Chat
from forage_weights.rollout.adapter import Adapter
from forage_weights.rollout.canary import CanaryError
from forage_weights.rollout.policy import EngineHangsError, EngineLostError, NotServingError, parse_label
from forage_weights.rollout.preparation import call_living

log = get_logger()


class VllmEngine:
    """One model in one AsyncLLM. Create it inside the event loop that will use it.

    Raises:
        SettingsError: as `PolicyLoader`.
    """

    def __init__(self, settings: Settings) -> None:
        rollout = settings.rollout
        self._meter = Meter()
        self._leases = Leases(rollout.trajectory_timeout_s) if rollout.weights.update == "drain" else None
        self._loader = PolicyLoader(settings, self._meter, self._leases)
        self._tokenizer = self.llm.get_tokenizer()
        self._stops = StopTexts(self._tokenizer.get_vocab())
        self._request_ids = itertools.count()
        self._hang_timeout_s = rollout.engine.hang_timeout_s
        self._sampled_tokens = 0
        self._asleep_at: float | None = None

    @property
    def serving(self) -> Policy | None:
        """The policy whose tokens are sampled; None = the weights of `model.path`."""
        return self._loader.serving

    @property
    def out_of_service(self) -> str:
        """Why `generate` refuses, such as a published policy that cannot be loaded; loading one clears it."""
        return self._loader.out_of_service

    @out_of_service.setter
    def out_of_service(self, reason: str) -> None:
        self._loader.out_of_service = reason

    @property
    def is_starting_again(self) -> bool:
        """Whether a policy is loaded afresh: vLLM is started with it, out of service meanwhile."""
        return self._loader.is_starting_again

    @property
    def difference(self) -> float | None:
        """What the log-probabilities of the policy that was loaded last differ by from the trainer's, in nats."""
        return self._loader.canary.difference

    @property
    def _instance(self) -> Instance:
        return self._loader.instance

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM, for vLLM's own serving classes; another one after a fresh load."""
        return self._instance.llm

    @property
    def dtype(self) -> str:
        """See `Instance.dtype`."""
        return self._instance.dtype

    @property
    def end_of_turn(self) -> str:
        """The tokenizer's end-of-sequence text."""
        return str(self._tokenizer.eos_token or "")

    @property
    def is_paused(self) -> bool:
        """Whether generation was paused and not resumed."""
        return self._instance.pause.is_paused

    @property
    def counts(self) -> EngineCounts:
        """Counts as of now."""
        counts, states = self._meter.counts, self._instance.states.values()
        counts.requests_waiting = sum(state.is_prefilling for state in states)
        counts.requests_running = len(states) - counts.requests_waiting
        self._instance.watch.write_to(counts, len(states))
        self._loader.write_to(counts)
        counts.paused, counts.out_of_service = int(self.is_paused), int(bool(self.out_of_service))
        counts.asleep = int(self.is_asleep)
        return counts

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        """See `chat.render_chat`."""
        return render_chat(self._tokenizer, messages, values)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample to a stop text, the end-of-sequence token or `max_tokens`.

        In drain mode the request's `affinity` holds a lease from now until `release`, so that one policy serves all of
        its requests.

        Raises:
            NotServingError: see `out_of_service`; or the engine has died.
            EngineLostError: the engine died, or loaded a policy afresh, while it sampled this.
            RefusedSamplingError: vLLM does not take a sampling parameter.
        """
        if self.out_of_service:
            raise NotServingError(self.out_of_service)
        if self.has_died:
            raise NotServingError("the engine has died, and is started again")
        if self._leases is None:
            return await self._generate(request)
        lease = request.affinity or f"request {next(self._request_ids)}"
        await self._leases.acquire(lease)
        try:
            if self.out_of_service:  # since then: the load that this waited for has failed
                raise NotServingError(self.out_of_service)
            return await self._generate(request)
        finally:
            if not request.affinity:
                await self._leases.release(lease)

    def check_sampling(self, sampling: Sampling) -> tuple[str, str]:
        """See `find_refusal`."""
        return find_refusal(sampling, self._stops)

    async def release(self, affinity: str) -> None:
        """End an affinity: no more requests of it will come. Only drain mode uses this."""
        if self._leases is not None:
            await self._leases.release(affinity)

    async def _generate(self, request: GenerationRequest) -> Generation:
        with self._meter.track_request() as counts:
            async with self._instance.adapters.use_current() as adapter:
                final = await self._sample(request, adapter)
        output = final.outputs[0]
        ids = list(output.token_ids)
        counts.prompt_tokens += len(request.token_ids)
        counts.cached_prompt_tokens += final.num_cached_tokens or 0
        counts.sampled_tokens += len(ids)
        # vLLM labels tokens with the weights' version, of which an adapter is no part; it stays for a whole generation.
        if adapter is not None:
            versions = [(adapter.policy.version, adapter.policy.epoch, 0, len(ids))]
        else:
            versions = [(*parse_label(v.version), v.start, v.end) for v in output.weight_versions or ()]
        flat = output.logprobs
        return Generation(
            token_ids=ids,
            logprobs=[flat.logprobs[start] for start in flat.start_indices[: len(ids)]],
            hit_length=output.finish_reason == "length",
            versions=versions,
        )

    async def _sample(self, request: GenerationRequest, adapter: Adapter | None) -> Any:
        """vLLM's final `RequestOutput`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        parameters = build_parameters(request, self._stops)
        try:
            async for output in self.llm.generate(
                {"prompt_token_ids": request.token_ids},
                parameters,
                request_id=str(next(self._request_ids)),
                lora_request=adapter and adapter.request,
                priority=request.priority,
            ):
                final = output
        except EngineDeadError as error:
            raise EngineLostError(f"the engine died while it sampled ({error})") from error
        if final.outputs[0].finish_reason == "abort":
            raise EngineLostError(f"this was given up: {self.out_of_service or 'vLLM was started again'}")
        return final

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        """See `PolicyLoader.load`."""
        return await self._loader.load(policy, allow_older)

    async def pause(self, drain: bool) -> None:
        """Hold generation until `resume`; policies may be loaded meanwhile.

        Args:
            drain: running generations end first, in drain mode whole groups; else they go on after `resume`.
        """
        await self._loader.change_pause(lambda pause: pause.pause(drain, self._loader.drain()))

    async def resume(self) -> None:
        """End a pause; without one nothing happens."""
        await self._loader.change_pause(lambda pause: pause.resume())

    async def fall_asleep(self) -> None:
        """Give the GPUs' memory away until `wake_up`; requests wait meanwhile, and so do policies.

        Raises:
            Exception: it cannot be done; the engine's processes are killed, which frees the memory, too.
        """
        async with self._loader.lock:
            before = await self._measure_free_memory()
            await self._change_memory(self._instance.pause.fall_asleep())
            counts = self._meter.counts
            if self._asleep_at is None:
                self._asleep_at = time.perf_counter()
                counts.sleeps += 1
                counts.freed_bytes = max(0, await self._measure_free_memory() - before)
        log.info("engine_sleeps", freed_bytes=self._meter.counts.freed_bytes)

    async def wake_weights(self) -> None:
        """Take the weights' memory again: policies may be loaded, requests go on waiting. Raises as `fall_asleep`."""
        await self._change_memory(self._instance.pause.wake_weights())

    async def wake_up(self) -> None:
        """Take all memory again and go on; without a sleep nothing happens.

        Raises:
            PolicyError: as `PolicyLoader.replace_serving`.
            Exception: as `fall_asleep`.
        """
        try:
            await self._change_memory(self._instance.pause.wake_up())
        except CanaryError as error:
            await self._loader.replace_serving(error)
        if self._asleep_at is not None:
            slept, self._asleep_at = time.perf_counter() - self._asleep_at, None
            self._meter.counts.asleep_seconds += slept
            log.info("engine_wakes", asleep_s=round(slept, 3))

    async def _change_memory(self, change: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                await call_living(self.llm, change)
        except CanaryError:
            raise
        except Exception as error:
            self.out_of_service = f"the memory of the engine is in no known state ({error!r}): it must be started again"
            self.kill()
            raise

    async def _measure_free_memory(self) -> int:
        """Bytes that are free on the GPUs of this engine; 0 on CPU."""
        return sum(await call_living(self.llm, self.llm.collective_rpc("measure_free_memory")))

    @property
    def is_asleep(self) -> bool:
        """Whether `wake_up` is needed."""
        return self._instance.pause.is_asleep

    @property
    def drains(self) -> bool:
        """Whether a load waits for running groups to end."""
        return self._leases is not None

    @property
    def has_died(self) -> bool:
        """Whether the engine's process has ended, or is of no use any more."""
        return bool(self.llm.errored) and not self.is_starting_again

    @property
    def stands_still(self) -> bool:
        """Whether it has work and does none, as where its process is stopped; to be asked every second or so."""
        is_busy = self._instance.states and not self._instance.pause.is_intended
        return self._instance.watch.stands_still(bool(is_busy))

    async def check_health(self) -> None:
        """Raise when the engine has died."""
        if not self.is_starting_again:
            await self.llm.check_health()

    async def probe(self) -> None:
        """Sample one token, unless tokens were sampled since the last call or generation is paused.

        Raises:
            EngineHangsError: nothing was sampled within `engine.hang_timeout_s`.
        """
        if self.is_starting_again or self._instance.pause.is_intended or self._has_progressed():
            return
        asked = self._instance
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                await self._sample(GenerationRequest([self._tokenizer.eos_token_id or 0], 1, 0.0, 1.0, -1, None), None)
        except EngineLostError:
            if not self.is_starting_again and self._instance is asked:
                raise
        except TimeoutError:
            if not (self.is_starting_again or self._instance.pause.is_intended or self._has_progressed()):
                raise EngineHangsError(f"the engine has sampled nothing for {self._hang_timeout_s:g} s") from None

    def _has_progressed(self) -> bool:
        """Whether tokens were sampled since the last call."""
        running = self._instance.states.values()
        now = self._meter.counts.sampled_tokens + sum(state.detokenizer.num_output_tokens() for state in running)
        before, self._sampled_tokens = self._sampled_tokens, now
        return bool(now != before)

    def kill(self) -> None:
        """Kill the engine's processes: running and later requests fail."""
        self._loader.close()
        self._instance.kill()

    def shutdown(self) -> None:
        """End the engine's processes; a second call does nothing."""
        self._loader.close()
        self._instance.shutdown()
