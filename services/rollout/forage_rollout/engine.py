"""vLLM's AsyncLLM, as the service uses it: sample tokens, load a policy in place, say what is served."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forage_common.model_folder import model_shapes
from forage_common.settings import EngineSettings, Settings
from forage_common.telemetry import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.generation import Generation, Request
from forage_rollout.policy import label, parse_label, verify
from forage_rollout.turns import STOP

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


@dataclass
class EngineCounts:
    """What an engine has done since it started."""

    requests: int = 0
    requests_in_flight: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    sampled_tokens: int = 0
    policy_updates: int = 0
    policy_pause_seconds: float = 0.0
    policy_failures: int = 0


class VllmEngine:
    """One model in one AsyncLLM. Make it inside the event loop that will use it."""

    def __init__(self, settings: Settings) -> None:
        os.environ.update(environment(settings.rollout.engine))
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from forage_rollout.weights import BACKEND

        engine = settings.rollout.engine
        arguments: dict[str, Any] = {}
        if current_platform.is_cpu():
            # A seeded request whose prompt is split ends the engine on CPU ("Generator does not use offset").
            tokens = max(engine.max_model_len, _BATCHED_TOKENS_CPU)
            arguments = {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        self._model = Path(settings.model.path).resolve()
        self._shapes = model_shapes(self._model)
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(self._model),
                dtype=engine.dtype,
                enforce_eager=engine.enforce_eager,
                max_model_len=engine.max_model_len,
                max_num_seqs=engine.max_num_seqs,
                block_size=engine.block_size,
                gpu_memory_utilization=engine.gpu_memory_utilization,
                tensor_parallel_size=engine.tensor_parallel_size,
                seed=settings.run.seed,
                logprobs_mode="processed_logprobs",
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                disable_log_stats=True,
                enable_log_requests=False,
                **arguments,
            )
        )
        self._tokenizer = self._llm.get_tokenizer()
        self._stops = self._stop_arguments()
        self._ids = itertools.count()
        self._transfer_ready = False
        self._changed = asyncio.Condition()
        self.serving: Policy | None = None
        self.counts = EngineCounts()

    @property
    def end_of_turn(self) -> str:
        """The tokenizer's end-of-sequence text."""
        return str(self._tokenizer.eos_token or "")

    async def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn.

        Raises:
            ValueError: the chat template refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise ValueError(str(error)) from None
        return [int(token) for token in ids]

    async def generate(self, request: Request) -> Generation:
        """Sample until a stop string, end-of-sequence or `max_tokens`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            max_tokens=request.max_tokens,
            logprobs=0,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self._stops,
        )
        self.counts.requests += 1
        self.counts.requests_in_flight += 1
        try:
            stream = self._llm.generate(
                {"prompt_token_ids": request.token_ids}, parameters, request_id=str(next(self._ids))
            )
            async for output in stream:
                final = output
        finally:
            self.counts.requests_in_flight -= 1
        part = final.outputs[0]
        ids = [int(token) for token in part.token_ids]
        self.counts.prompt_tokens += len(request.token_ids)
        self.counts.cached_prompt_tokens += final.num_cached_tokens or 0
        self.counts.sampled_tokens += len(ids)
        return Generation(
            token_ids=ids,
            logprobs=[row[token].logprob for row, token in zip(part.logprobs, ids, strict=True)],
            hit_length=part.finish_reason == "length",
            versions=[(*parse_label(v.version), v.start, v.end) for v in part.weight_versions or ()],
        )

    async def load(self, policy: Policy) -> float:
        """Serve another policy; running requests go on under it. Returns the seconds that generation stood still.

        Raises:
            PolicyError: it must not be served; the engine goes on as before.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        try:
            file = await asyncio.to_thread(verify, policy, self._shapes)
        except Exception:
            self.counts.policy_failures += 1
            raise
        if not self._transfer_ready:
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            self._transfer_ready = True
        start = time.perf_counter()
        # Keys and values of the old weights must go: running requests compute theirs again.
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(file)}))
        await self._llm.finish_weight_update(label(policy))
        await self._llm.resume_generation()
        seconds = time.perf_counter() - start
        self.counts.policy_updates += 1
        self.counts.policy_pause_seconds += seconds
        async with self._changed:
            self.serving = policy
            self._changed.notify_all()
        log.info("policy_loaded", version=policy.version, epoch=policy.epoch, seconds=round(seconds, 3))
        return seconds

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

    async def check_health(self) -> None:
        """Raises when the engine has died."""
        await self._llm.check_health()

    def shutdown(self) -> None:
        """End the engine's processes; a second call does nothing."""
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            llm.shutdown()

    def _stop_arguments(self) -> dict[str, Any]:
        """Tokens that hold a closing tag stop the engine at once; a tag spelt in pieces stops it by its text."""
        return {
            "stop_token_ids": stop_token_ids(self._tokenizer.get_vocab()),
            "stop": list(STOP),
            "include_stop_str_in_output": True,
        }


def stop_token_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """Every token whose text holds a whole stop string, also with a space or more around it."""
    return sorted(id for token, id in vocabulary.items() if any(tag in token for tag in STOP))
