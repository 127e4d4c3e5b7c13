"""vLLM's sampling parameters of a generation. What vLLM does not take it refuses itself, in its own words."""

from __future__ import annotations

from typing import Any

from forage_proto.v1.trajectory_pb2 import Sampling
from forage_rollout.engine.stops import StopTexts
from forage_rollout.loop.generation import GenerationRequest, build_request
from forage_runtime.clients.calls import RefusedError


class RefusedSamplingError(RefusedError):
    """vLLM does not take a sampling parameter; the message has its words.

    Attributes:
        parameter: vLLM's name of the parameter; empty where it names none.
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


def build_parameters(request: GenerationRequest, stops: StopTexts) -> Any:
    """vLLM's `SamplingParams` of a generation.

    Raises:
        RefusedSamplingError: vLLM does not take a value.
    """
    from vllm.sampling_params import RequestOutputKind

    return make_parameters(
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
        **stops.build_arguments(request.stop),
    )


def find_refusal(sampling: Sampling, stops: StopTexts) -> tuple[str, str]:
    """(vLLM's name of the parameter that it refuses, its words); both are empty where it takes all of them."""
    try:
        build_parameters(build_request(sampling, [0], max_tokens=1, sample=0, turn=1), stops)
    except RefusedSamplingError as error:
        return error.parameter, str(error)
    return "", ""


def make_parameters(**values: Any) -> Any:
    """vLLM's `SamplingParams` of these values.

    Raises:
        RefusedSamplingError: vLLM does not take one of them.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        return SamplingParams(**values)
    except VLLMValidationError as error:
        words = str(error.args[0]).rstrip(".")
        # Not every refusal has the parameter apart, but each begins with it.
        first = words.split(maxsplit=1)[0].strip("`")
        raise RefusedSamplingError(words, error.parameter or (first if first in values else "")) from None
