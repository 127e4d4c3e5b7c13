"""Whether an engine serves what was trained: it must give the trainer's log-probabilities of a few tokens."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any, Literal

from forage_proto.v1.trajectory_pb2 import Canary, Policy
from forage_runtime.telemetry.logs import get_logger
from forage_weights.announcement import PolicyError, describe_policy

log = get_logger()
PREFIX = "canary-"
"""Begins the ids of requests that score a canary: see `canary_scheduler`."""
HOLD = f"{PREFIX}hold-"
"""Begins the id of a request that keeps every other one waiting until it is aborted."""
_WHAT_TO_DO = "trainer and engine compute different models, and rollout.weights.canary=warn would serve it all the same"
_numbers = itertools.count()


class CanaryError(PolicyError):
    """An engine that has loaded a policy gives other log-probabilities than the trainer.

    Attributes:
        difference: the mean difference, in nats.
    """

    def __init__(self, message: str, difference: float) -> None:
        super().__init__(message)
        self.difference = difference


@dataclass(frozen=True)
class Tolerance:
    """Mean differences of log-probabilities, in nats.

    Attributes:
        noise: what rounding explains, whatever the policy.
        most: what rounding explains of two libraries that compute the same model in kernels of their own.
    """

    noise: float
    most: float


TOLERANCES = {
    "float32": Tolerance(1e-4, 5e-3),
    "float16": Tolerance(5e-3, 5e-2),
    "bfloat16": Tolerance(2e-2, 2e-1),
}
"""By the coarsest type: that of engine, trainer or published weights. Of 76 kinds of tiny random models that vLLM
serves on a CPU in float32, it differs from transformers by at most 1.7e-3 where both compute the same (Cohere 2), and
by 3e-2 and more where they do not (docs/reference/models.md). Half precision was not measured on GPUs."""
_TIMES = 4
"""How many times what a fresh load differs by a load in place may."""


class CanaryBounds:
    """What an engine's log-probabilities may differ by from the trainer's.

    Args:
        dtype: what the engine computes in, as PyTorch names it.
        is_exact: False where arguments of the user's make the engine compute otherwise than the trainer on purpose.

    Attributes:
        fresh: what a policy differed by that this engine was started with; None: not measured.
    """

    def __init__(self, dtype: str, is_exact: bool = True) -> None:
        self._dtype, self._is_exact = dtype, is_exact
        self.fresh: float | None = None

    def find(self, canary: Canary, is_fresh: bool) -> float:
        """The bound of a load.

        Args:
            is_fresh: the engine was started with the policy; else it was loaded into a running one.
        """
        known = [TOLERANCES[name] for name in (self._dtype, canary.dtype) if name in TOLERANCES]
        tolerance = max(known, key=lambda one: one.noise, default=TOLERANCES["bfloat16"])
        most = tolerance.most if self._is_exact else math.inf
        return most if is_fresh else min(most, max(tolerance.noise, _TIMES * (self.fresh or 0.0)))


async def measure_difference(llm: Any, canary: Canary, lora_request: Any = None) -> float:
    """Score the canary's tokens; returns the mean difference from the trainer's log-probabilities, in nats.

    Args:
        llm: vLLM's AsyncLLM, which may be paused.
        lora_request: the adapter that is scored.
    """
    longest = llm.model_config.max_model_len - 1  # a token is sampled behind them
    rows = [([*row.token_ids][:longest], [*row.logprobs]) for row in canary.rows]
    scored = await asyncio.gather(*(_score(llm, tokens, lora_request) for tokens, _ in rows))
    pairs = [pair for (_, given), found in zip(rows, scored, strict=True) for pair in zip(given, found, strict=False)]
    difference = sum(abs(given - found) for given, found in pairs) / len(pairs) if pairs else 0.0
    return difference if math.isfinite(difference) else math.inf


async def _score(llm: Any, tokens: list[int], lora_request: Any) -> list[float]:
    """The engine's log-probabilities of all tokens but the first, at temperature 1."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for output in llm.generate(
        {"prompt_token_ids": tokens}, parameters, request_id=f"{PREFIX}{next(_numbers)}", lora_request=lora_request
    ):
        final = output
    return [places[token].logprob for token, places in zip(tokens[1:], final.prompt_logprobs[1:], strict=True)]


async def hold_requests(llm: Any) -> str:
    """Let no pause end, and nothing but canaries run, until the request whose id this returns is aborted."""
    from vllm import SamplingParams

    name = f"{HOLD}{next(_numbers)}"
    await llm.add_request(name, {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, detokenize=False))
    return name


class CanaryCheck:
    """Checks the policies that an engine has loaded.

    Args:
        mode: as of `rollout.weights.canary`.
        limit_s: longest time for the tokens of a canary.

    Attributes:
        difference: that of the last check, in nats; None before the first.
        failures: checks in which it was beyond the bound.
        seconds: time of all checks.
    """

    def __init__(self, mode: Literal["refuse", "warn", "off"], limit_s: float) -> None:
        self._mode, self._limit_s = mode, limit_s
        self.difference: float | None = None
        self.failures, self.seconds = 0, 0.0

    async def require(
        self, llm: Any, bounds: CanaryBounds, policy: Policy, is_fresh: bool, lora_request: Any = None
    ) -> None:
        """Return if the engine gives the trainer's log-probabilities, or a difference is only warned of.

        Args:
            llm, lora_request: as of `measure_difference`.
            is_fresh: as of `CanaryBounds.find`; `bounds` keeps what is measured then, if it is within.

        Raises:
            CanaryError: it gives others.
            TimeoutError: it gives none.
        """
        if self._mode == "off" or not policy.canary.rows:
            return
        began = time.perf_counter()
        async with asyncio.timeout(self._limit_s):
            difference = await measure_difference(llm, policy.canary, lora_request)
        self.difference, self.seconds = difference, self.seconds + time.perf_counter() - began
        bound = bounds.find(policy.canary, is_fresh)
        if difference <= bound:
            if is_fresh:
                bounds.fresh = difference
            return
        self.failures += 1
        how = "although vLLM was started with it" if is_fresh else "as it was put in place"
        remedy = f": {_WHAT_TO_DO}" if is_fresh else ""
        message = (
            f"{describe_policy(policy)} is not what this engine computes {how}: its log-probabilities differ from the "
            f"trainer's by {difference:.2g} nats on average, expected at most {bound:.2g} (a model of the kind "
            f"{llm.model_config.hf_config.model_type}){remedy}"
        )
        if self._mode == "refuse":
            raise CanaryError(message, difference)
        log.warning("canary_differs", detail=message)
