"""The engine on vLLM's AsyncLLM: samples tokens, loads policies in place, reports the policy that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from forage_common.files.model_folder import list_weight_files
from forage_common.files.served_lora import get_served_lora_rank
from forage_common.settings import Settings
from forage_common.telemetry.logs import get_logger
from forage_common.text.chat_template import Chat
from forage_common.v1.trajectory_pb2 import Policy, Sampling, TemplateValues
from forage_policies.announcement import PolicyError, describe_policy
from forage_policies.tensors import SUFFIX, read_headers
from forage_rollout.core.arguments import build_arguments, build_environment
from forage_rollout.core.process import use_own_processes
from forage_rollout.engine.chat import render_chat
from forage_rollout.engine.engine_counts import EngineCounts, Meter
from forage_rollout.engine.generation_pause import GenerationPause
from forage_rollout.engine.leases import Leases
from forage_rollout.engine.sampling_parameters import build_parameters, find_refusal
from forage_rollout.engine.scheduler_watch import SchedulerWatch
from forage_rollout.engine.stager import Stager, call_living
from forage_rollout.engine.stops import StopTexts
from forage_rollout.loop.generation import Generation, RenderedPrompt, Request
from forage_rollout.weights.adapter import Adapter, Adapters, verify_adapter
from forage_rollout.weights.holding import hold_policy, open_cache
from forage_rollout.weights.policy import EngineHangsError, EngineLostError, NotServingError, is_newer, parse_label
from forage_rollout.weights.validation import verify_tensors

log = get_logger()


class VllmEngine:
    """One model in one AsyncLLM. Create it inside the event loop that will use it.

    Attributes:
        serving: the policy whose tokens are sampled; None = the weights of `model.path`.
        out_of_service: why `generate` refuses, such as a published policy that cannot be loaded; loading one clears it.

    Raises:
        SettingsError: as `build_arguments` and `open_cache`.
    """

    def __init__(self, settings: Settings) -> None:
        os.environ.update(build_environment(settings.rollout.engine))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        use_own_processes()
        engine, weights = settings.rollout.engine, settings.rollout.weights
        model = Path(settings.model.path).resolve()
        self._expected = read_headers(model / name for name in list_weight_files(model))
        self._shapes = {name: info.shape for name, info in self._expected.items()}
        self._cache = open_cache(settings)
        arguments = AsyncEngineArgs(**build_arguments(settings, bool(current_platform.is_cpu())))
        self._scheduler = SchedulerWatch()
        self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._scheduler.build_logger_class()])
        self._scheduler.watch_outputs(self._llm.output_processor)
        self._tokenizer = self._llm.get_tokenizer()
        self._stops = StopTexts(self._tokenizer.get_vocab())
        self._request_ids = itertools.count()
        self._max_lora_rank = get_served_lora_rank(settings)
        self._adapters = Adapters(self._llm)
        self._hang_timeout_s = engine.hang_timeout_s
        self._leases = Leases(settings.rollout.trajectory_timeout_s) if weights.update == "drain" else None
        self._pause = GenerationPause(self._llm, self._scheduler)
        self._stager = Stager(self._llm)
        self._loading = asyncio.Lock()
        self._sampled_tokens = 0
        self._asleep_at: float | None = None
        self._meter = Meter()
        self.serving: Policy | None = None
        self.out_of_service = ""

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM, for vLLM's own serving classes."""
        return self._llm

    @property
    def dtype(self) -> str:
        """What the engine computes in, as PyTorch names it: vLLM decides what `auto` is."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def end_of_turn(self) -> str:
        """The tokenizer's end-of-sequence text."""
        return str(self._tokenizer.eos_token or "")

    @property
    def is_paused(self) -> bool:
        """Whether generation was paused and not resumed."""
        return self._pause.is_paused

    @property
    def counts(self) -> EngineCounts:
        """Counts as of now."""
        counts, states = self._meter.counts, self._llm.output_processor.request_states.values()
        counts.requests_waiting = sum(state.is_prefilling for state in states)
        counts.requests_running = len(states) - counts.requests_waiting
        self._scheduler.write_to(counts, len(states))
        counts.direct_transfers, counts.direct_fallbacks = self._cache.received, self._cache.fallbacks
        counts.paused, counts.out_of_service = int(self.is_paused), int(bool(self.out_of_service))
        counts.asleep = int(self.is_asleep)
        return counts

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        """See `chat.render_chat`."""
        return render_chat(self._tokenizer, messages, values)

    async def generate(self, request: Request) -> Generation:
        """Sample to a stop text, the end-of-sequence token or `max_tokens`.

        In drain mode the request's `affinity` holds a lease from now until `release`, so that one policy serves all of
        its requests.

        Raises:
            NotServingError: see `out_of_service`; or the engine has died.
            EngineLostError: the engine died while it sampled this.
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

    async def _generate(self, request: Request) -> Generation:
        with self._meter.track_request() as counts:
            async with self._adapters.use_current() as adapter:
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

    async def _sample(self, request: Request, adapter: Adapter | None) -> Any:
        """vLLM's final `RequestOutput`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        parameters = build_parameters(request, self._stops)
        try:
            async for output in self._llm.generate(
                {"prompt_token_ids": request.token_ids},
                parameters,
                request_id=str(next(self._request_ids)),
                lora_request=adapter and adapter.request,
                priority=request.priority,
            ):
                final = output
        except EngineDeadError as error:
            raise EngineLostError(f"the engine died while it sampled ({error})") from error
        return final

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> float:
        """Serve another policy. A caller that is cancelled before the pause leaves the engine as it was.

        Running generations go on under the new policy; those with an adapter keep theirs to their end. In drain mode
        the load waits until all leases are released.

        Args:
            allow_older: the policy need not be newer than the served one: it is the one that the trainer announced.

        Returns:
            Seconds that generation stood still.

        Raises:
            PolicyError: the policy must not be served; the engine goes on as before.
        """
        async with self._loading:
            await self._pause.has_weights.wait()  # wait: for the end of a sleep, which has a time limit
            try:
                self._check_policy(policy, allow_older)
                load = self._load_adapter if policy.adapter else self._load_whole
                seconds = await load(policy)
            except Exception:
                self._meter.counts.policy_failures += 1
                raise
        self._meter.counts.policy_updates += 1
        log.info("policy_loaded", version=policy.version, epoch=policy.epoch, seconds=round(seconds, 3))
        return seconds

    def _check_policy(self, policy: Policy, allow_older: bool) -> None:
        if not allow_older and not is_newer(policy, self.serving):
            served = "" if self.serving is None else describe_policy(self.serving)
            raise PolicyError(f"{describe_policy(policy)} is not newer than {served}, now served")
        if policy.adapter != bool(self._max_lora_rank):
            kind = "a LoRA adapter" if policy.adapter else "a whole policy"
            raise PolicyError(
                f"{describe_policy(policy)} is {kind} and "
                f"rollout.engine.max_lora_rank is {self._max_lora_rank}: "
                "an engine with a rank loads adapters only, one without loads none"
            )

    async def _load_adapter(self, policy: Policy) -> float:
        async with hold_policy(self._cache, policy) as held:
            folder = await asyncio.to_thread(verify_adapter, policy, held.files, self._shapes, self._max_lora_rank)
            async with self._drain_leases():
                await self._adapters.load_adapter(policy, folder)
                self._set_serving(policy)
        self._meter.counts.adapter_loads += 1
        return 0.0

    async def _load_whole(self, policy: Policy) -> float:
        """Load a policy while the old one is served; only to put it in place is there a pause."""
        counts, began = self._meter.counts, time.perf_counter()
        async with contextlib.AsyncExitStack() as stack:
            held = await stack.enter_async_context(hold_policy(self._cache, policy))
            files = [file for file in held.files if file.suffix == SUFFIX]
            await asyncio.to_thread(verify_tensors, policy, files, self._expected, self.dtype)
            number = await stack.enter_async_context(self._stager.stage(policy, files, held.deltas, held.content))
            counts.policy_stage_seconds += time.perf_counter() - began
            await stack.enter_async_context(self._drain_leases())
            putting = asyncio.ensure_future(self._put_policy(policy, number))
            try:
                # Shielded, because weights that are replaced halfway belong to no policy.
                return await asyncio.shield(putting)
            except asyncio.CancelledError:
                await asyncio.wait([putting])  # wait: the pause is over in a moment
                raise

    async def _put_policy(self, policy: Policy, number: int) -> float:
        try:
            waited, paused = await call_living(self._llm, self._pause.put_policy(policy, number))
        except BaseException as error:
            # Partially replaced weights belong to no policy. Ending the engine makes Serve start another one.
            self.out_of_service = (
                f"{describe_policy(policy)} was partially loaded ({error!r}): the engine must be started again"
            )
            self.kill()
            raise
        self._meter.counts.policy_wait_seconds += waited
        self._meter.counts.policy_pause_seconds += paused
        self._set_serving(policy)
        return paused

    def _drain_leases(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if self._leases is None else self._leases.drain()

    def _set_serving(self, policy: Policy) -> None:
        self.serving = policy
        self.out_of_service = ""

    async def pause(self, drain: bool) -> None:
        """Hold generation until `resume`; policies may be loaded meanwhile.

        Args:
            drain: running generations end first, in drain mode whole groups; else they go on after `resume`.
        """
        await self._pause.pause(drain, self._drain_leases())

    async def resume(self) -> None:
        """End a pause; without one nothing happens."""
        await self._pause.resume()

    async def fall_asleep(self) -> None:
        """Give the GPUs' memory away until `wake_up`; requests wait meanwhile, and so do policies.

        Raises:
            Exception: it cannot be done; the engine's processes are killed, which frees the memory, too.
        """
        async with self._loading:
            before = await self._measure_free_memory()
            await self._change_memory(self._pause.fall_asleep())
            counts = self._meter.counts
            if self._asleep_at is None:
                self._asleep_at = time.perf_counter()
                counts.sleeps += 1
                counts.freed_bytes = max(0, await self._measure_free_memory() - before)
        log.info("engine_sleeps", freed_bytes=self._meter.counts.freed_bytes)

    async def wake_weights(self) -> None:
        """Take the weights' memory again: policies may be loaded, requests go on waiting. Raises as `fall_asleep`."""
        await self._change_memory(self._pause.wake_weights())

    async def wake_up(self) -> None:
        """Take all memory again and go on; without a sleep nothing happens. Raises as `fall_asleep`."""
        await self._change_memory(self._pause.wake_up())
        if self._asleep_at is not None:
            slept, self._asleep_at = time.perf_counter() - self._asleep_at, None
            self._meter.counts.asleep_seconds += slept
            log.info("engine_wakes", asleep_s=round(slept, 3))

    async def _change_memory(self, change: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                await call_living(self._llm, change)
        except Exception as error:
            self.out_of_service = f"the memory of the engine is in no known state ({error!r}): it must be started again"
            self.kill()
            raise

    async def _measure_free_memory(self) -> int:
        """Bytes that are free on the GPUs of this engine; 0 on CPU."""
        return sum(await call_living(self._llm, self._llm.collective_rpc("measure_free_memory")))

    @property
    def is_asleep(self) -> bool:
        """Whether `wake_up` is needed."""
        return self._pause.is_asleep

    @property
    def drains(self) -> bool:
        """Whether a load waits for running groups to end."""
        return self._leases is not None

    @property
    def has_died(self) -> bool:
        """Whether the engine's process has ended, or is of no use any more."""
        return bool(self._llm.errored)

    @property
    def stands_still(self) -> bool:
        """Whether it has work and does none, as where its process is stopped; to be asked every second or so."""
        is_busy = self._llm.output_processor.request_states and not self._pause.is_intended
        return self._scheduler.stands_still(bool(is_busy))

    async def check_health(self) -> None:
        """Raise when the engine has died."""
        await self._llm.check_health()

    async def probe(self) -> None:
        """Sample one token, unless tokens were sampled since the last call or generation is paused.

        Raises:
            EngineHangsError: nothing was sampled within `engine.hang_timeout_s`.
        """
        if self._pause.is_intended or self._has_progressed():
            return
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                await self._sample(Request([self._tokenizer.eos_token_id or 0], 1, 0.0, 1.0, -1, None), None)
        except TimeoutError:
            if not (self._pause.is_intended or self._has_progressed()):
                raise EngineHangsError(f"the engine has sampled nothing for {self._hang_timeout_s:g} s") from None

    def _has_progressed(self) -> bool:
        """Whether tokens were sampled since the last call."""
        running = self._llm.output_processor.request_states.values()
        now = self._meter.counts.sampled_tokens + sum(state.detokenizer.num_output_tokens() for state in running)
        before, self._sampled_tokens = self._sampled_tokens, now
        return bool(now != before)

    def kill(self) -> None:
        """Kill the engine's processes: running and later requests fail."""
        for process in self._llm.engine_core.resources.engine_manager.processes:
            process.kill()

    def shutdown(self) -> None:
        """End the engine's processes; a second call does nothing."""
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            del self._adapters, self._pause, self._stager  # the last references to it
            llm.shutdown()
