"""vLLM's AsyncLLM, as the service uses it: sample tokens, load a policy in place, say what is served."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forage_common.files.model_folder import read_model_shapes
from forage_common.settings import EngineSettings, Settings, WeightTransport, WeightUpdate
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.engine.chat import render
from forage_rollout.engine.engine_counts import EngineCounts, Meter
from forage_rollout.engine.generation_pause import Standstill
from forage_rollout.engine.leases import Leases
from forage_rollout.engine.stops import Stops
from forage_rollout.loop.generation import Generation, Request
from forage_rollout.weights.adapter import Adapter, Adapters, verify_adapter
from forage_rollout.weights.adapter import arguments as adapter_arguments
from forage_rollout.weights.filesystem import Filesystem, fetch
from forage_rollout.weights.nccl import Nccl
from forage_rollout.weights.policy import NotServingError, PolicyError, described, is_newer, parse_label
from forage_rollout.weights.transport import Shipment, Transport

log = get_logger()
_BATCHED_TOKENS_CPU = 4096


def environment(settings: EngineSettings) -> dict[str, str]:
    """What vLLM reads from the environment; must be set before it is imported."""
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TQDM_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_cache_gib))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }


class EngineHangsError(RuntimeError):
    """The engine has sampled nothing for too long although it should."""


class VllmEngine:
    """One model in one AsyncLLM. Make it inside the event loop that will use it.

    Args:
        replica: number of this engine among all that run, from 0.

    Attributes:
        serving: the policy whose tokens are sampled; None = the weights of `model.path`.
        out_of_service: why `generate` refuses, such as a published policy that cannot be loaded; a load clears it.

    Raises:
        SettingsError: a setting needs GPUs and there are none.
    """

    def __init__(self, settings: Settings, replica: int = 0) -> None:
        os.environ.update(environment(settings.rollout.engine))
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        engine, weights = settings.rollout.engine, settings.rollout.weights
        cpu = bool(current_platform.is_cpu())
        arguments: dict[str, Any] = {"dtype": engine.dtype}
        if cpu:
            # A seeded request whose prompt is split ends the engine on CPU ("Generator does not use offset").
            tokens = max(engine.max_model_len, _BATCHED_TOKENS_CPU)
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
            if engine.dtype == "auto":  # a CPU is slower in half precision, and far from the trainer's logprobs
                arguments["dtype"] = "float32"
        model = Path(settings.model.path).resolve()
        self._shapes = read_model_shapes(model)
        self._transport: Transport = (
            Nccl(self._shapes, replica, engine.tensor_parallel_size, gpu=not cpu)
            if weights.transport == WeightTransport.NCCL
            else Filesystem(self._shapes, weights.cache_dir.resolve())
        )
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                enforce_eager=engine.enforce_eager,
                max_model_len=engine.max_model_len,
                max_num_seqs=engine.max_num_seqs,
                block_size=engine.block_size,
                gpu_memory_utilization=engine.gpu_memory_utilization,
                tensor_parallel_size=engine.tensor_parallel_size,
                seed=settings.run.seed,
                logprobs_mode="processed_logprobs",
                weight_transfer_config=WeightTransferConfig(backend=self._transport.backend),
                disable_log_stats=True,
                enable_log_requests=False,
                **arguments,
                **adapter_arguments(engine.max_lora_rank),
            )
        )
        self._tokenizer = self._llm.get_tokenizer()
        self._stops = Stops(self._tokenizer.get_vocab())
        self._ids = itertools.count()
        self._cache_dir = weights.cache_dir.resolve()
        self._max_lora_rank = engine.max_lora_rank
        self._adapters = Adapters(self._llm)
        self._hang_timeout_s = engine.hang_timeout_s
        drains = weights.update == WeightUpdate.DRAIN
        self._leases = Leases(settings.rollout.trajectory_timeout_s) if drains else None
        self._standstill = Standstill(self._llm)
        self._loading = asyncio.Lock()
        self._progress = 0
        self._changed = asyncio.Condition()
        self._meter = Meter()
        self.serving: Policy | None = None
        self.out_of_service = ""

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM, for callers that bring requests of its own kind."""
        return self._llm

    @property
    def end_of_turn(self) -> str:
        """The tokenizer's end-of-sequence text."""
        return str(self._tokenizer.eos_token or "")

    @property
    def paused(self) -> bool:
        """Whether generation was paused and not resumed."""
        return self._standstill.paused

    @property
    def counts(self) -> EngineCounts:
        """How the engine stands now."""
        counts, states = self._meter.counts, self._llm.output_processor.request_states.values()
        counts.requests_waiting = sum(state.is_prefilling for state in states)
        counts.requests_running = len(states) - counts.requests_waiting
        counts.paused, counts.out_of_service = int(self.paused), int(bool(self.out_of_service))
        return counts

    async def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn.

        Raises:
            ValueError: the chat template refuses the messages.
        """
        return render(self._tokenizer, messages)

    async def generate(self, request: Request) -> Generation:
        """Sample until a stop text, end-of-sequence or `max_tokens`.

        In drain mode a request's `affinity` holds a lease from now until `release`: one policy serves it all along.

        Raises:
            NotServingError: see `out_of_service`.
        """
        if self.out_of_service:
            raise NotServingError(self.out_of_service)
        if self._leases is None:
            return await self._generate(request)
        lease = request.affinity or f"request {next(self._ids)}"
        await self._leases.open(lease)
        try:
            return await self._generate(request)
        finally:
            if not request.affinity:
                await self._leases.release(lease)

    async def release(self, affinity: str) -> None:
        """No more requests of this affinity will come; only drain mode needs to know."""
        if self._leases is not None:
            await self._leases.release(affinity)

    async def _generate(self, request: Request) -> Generation:
        with self._meter.request() as counts:
            async with self._adapters.use() as adapter:
                final = await self._sample(request, adapter)
        part = final.outputs[0]
        ids = list(part.token_ids)
        counts.prompt_tokens += len(request.token_ids)
        counts.cached_prompt_tokens += final.num_cached_tokens or 0
        counts.sampled_tokens += len(ids)
        if adapter is not None:
            versions = [(adapter.policy.version, adapter.policy.epoch, 0, len(ids))]
        else:
            versions = [(*parse_label(v.version), v.start, v.end) for v in part.weight_versions or ()]
        flat = part.logprobs
        return Generation(
            token_ids=ids,
            logprobs=[flat.logprobs[start] for start in flat.start_indices[: len(ids)]],
            hit_length=part.finish_reason == "length",
            versions=versions,
        )

    async def _sample(self, request: Request, adapter: Adapter | None) -> Any:
        """vLLM's whole `RequestOutput`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            logprobs=0,
            flat_logprobs=True,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self._stops.arguments(request.stop),
        )
        async for output in self._llm.generate(
            {"prompt_token_ids": request.token_ids},
            parameters,
            request_id=str(next(self._ids)),
            lora_request=adapter and adapter.request,
        ):
            final = output
        return final

    async def load(self, policy: Policy) -> float:
        """Serve another policy, whoever asks for it and whether they wait for it or not.

        Running generations go on under it; those of adapters end under the one they began with. In drain mode all
        leases are released first.

        Returns:
            Seconds that generation stood still.

        Raises:
            PolicyError: it must not be served; the engine goes on as before.
        """
        return await asyncio.shield(asyncio.ensure_future(self._load(policy)))

    async def _load(self, policy: Policy) -> float:
        async with self._loading:
            try:
                if not is_newer(policy, self.serving):
                    assert self.serving is not None
                    raise PolicyError(f"{described(policy)} is not newer than {described(self.serving)}, now served")
                if policy.adapter != bool(self._max_lora_rank):
                    kind = "a LoRA adapter" if policy.adapter else "a whole policy"
                    raise PolicyError(
                        f"{described(policy)} is {kind} and rollout.engine.max_lora_rank is {self._max_lora_rank}: "
                        "an engine with a rank takes adapters alone, one without takes none"
                    )
                if policy.adapter:
                    folder = await asyncio.to_thread(self._verified_adapter, policy)
                    async with self._drained():
                        await self._adapters.load(policy, folder)
                        await self._serve(policy)
                    self._meter.counts.adapter_loads += 1
                    seconds = 0.0
                else:
                    shipment = await self._transport.prepare(policy)
                    async with self._drained():
                        seconds = await self._update(policy, shipment)
                        await self._serve(policy)
            except Exception:
                self._meter.counts.policy_failures += 1
                raise
        counts = self._meter.counts
        counts.policy_updates += 1
        counts.policy_pause_seconds += seconds
        log.info("policy_loaded", version=policy.version, epoch=policy.epoch, seconds=round(seconds, 3))
        return seconds

    def _verified_adapter(self, policy: Policy) -> Path:
        return verify_adapter(policy, fetch(policy, self._cache_dir), self._shapes, self._max_lora_rank)

    def _drained(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if self._leases is None else self._leases.drained()

    async def _update(self, policy: Policy, shipment: Shipment) -> float:
        try:
            return await self._standstill.update(policy, shipment)
        except BaseException as error:
            self.out_of_service = f"{described(policy)} was loaded by half ({error!r}): the engine must start again"
            self.kill()
            raise

    async def _serve(self, policy: Policy) -> None:
        async with self._changed:
            self.serving = policy
            self.out_of_service = ""
            self._changed.notify_all()

    async def wait_for(self, version: int, epoch: int, timeout_s: float) -> Policy | None:
        """What is served, once it is at least this version of this epoch (or of a later one), or after the wait."""

        def reached() -> bool:
            served = self.serving
            return served is not None and (
                served.epoch > epoch or (served.epoch == epoch and served.version >= version)
            )

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(reached), timeout_s)
        return self.serving

    async def pause(self, drain: bool) -> None:
        """Let generation stand still until `resume`; policies may be loaded meanwhile.

        Args:
            drain: running generations end first, and in drain mode whole trajectories; else they go on after `resume`.
        """
        await self._standstill.pause(drain, self._drained())

    async def resume(self) -> None:
        """End a pause; without one nothing happens."""
        await self._standstill.resume()

    async def check_health(self) -> None:
        """Raises when the engine has died."""
        await self._llm.check_health()

    async def probe(self) -> None:
        """Sample a token, unless others were sampled since the last call or generation stands still on purpose.

        Raises:
            EngineHangsError: nothing was sampled within `engine.hang_timeout_s`.
        """
        if self._standstill.intended or self._progressed():
            return
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                await self._sample(Request([self._tokenizer.eos_token_id or 0], 1, 0.0, 1.0, -1, None), None)
        except TimeoutError:
            if not (self._standstill.intended or self._progressed()):
                raise EngineHangsError(f"the engine has sampled nothing for {self._hang_timeout_s:g} s") from None

    def _progressed(self) -> bool:
        """Whether tokens were sampled since the last call."""
        running = self._llm.output_processor.request_states.values()
        now = self._meter.counts.sampled_tokens + sum(state.detokenizer.num_output_tokens() for state in running)
        before, self._progress = self._progress, now
        return bool(now != before)

    def kill(self) -> None:
        """End the engine's processes at once: running and later requests fail."""
        for process in self._llm.engine_core.resources.engine_manager.processes:
            process.kill()

    def shutdown(self) -> None:
        """End the engine's processes; a second call does nothing."""
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            del self._adapters, self._standstill  # the last to hold it
            llm.shutdown()
