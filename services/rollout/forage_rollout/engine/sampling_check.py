"""Whether vLLM takes what the settings sample with: asked of vLLM, before a model is built."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from forage_proto.v1.trajectory_pb2 import Sampling
from forage_rollout.engine.sampling_parameters import RefusedSamplingError, build_parameters, make_parameters
from forage_rollout.engine.stops import StopTexts
from forage_rollout.loop.generation import build_request
from forage_rollout.vllm_start.vllm_args import build_environment
from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings

_SAMPLED = {
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "max_tokens": "rollout.max_response_length",
}
"""vLLM's parameter of a generation → the setting that sets it. Any length that the settings take is one for vLLM."""
_PROBES = "trainer.probe.samples"
_CHECKED = ("rollout.temperature", "rollout.top_p", "rollout.top_k", _PROBES)


def check_sampling(settings: Settings) -> None:
    """Build vLLM's sampling parameters for training, validation, users' questions and probes, as requests will.

    An endpoint knows its bounds itself: nothing is refused in its name.

    Raises:
        SettingsError: vLLM refuses a value; names the setting, the value and vLLM's words.
    """
    rollout, trainer = settings.rollout, settings.trainer
    if rollout.engine.endpoint:
        return
    own = Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
    for use, sampling in (("training", own), ("validation", Sampling()), ("ask", Sampling())):
        request = build_request(sampling, [0], rollout.max_response_length, sample=0, turn=1)
        _try_to_build(settings, use, _SAMPLED, partial(build_parameters, request, StopTexts({})))
    if trainer.probe.freq or trainer.algorithm.probe_penalty.coef:  # what else a probe samples with is constant
        build = partial(make_parameters, n=trainer.probe.samples, temperature=1.0, seed=1)
        _try_to_build(settings, "the probe", {"n": _PROBES}, build)


def check_before_start(settings: Settings) -> None:
    """`check_sampling` in a process of its own, as vLLM's modules take half a gigabyte.

    Raises:
        SettingsError: as `check_sampling`.
    """
    if not _is_known(settings):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(_check_apart, settings).result()


def _is_known(settings: Settings) -> bool:
    """Whether vLLM, which takes many seconds to import, need not be asked: it takes Forage's defaults, says a test."""
    defaults = Settings()
    return bool(settings.rollout.engine.endpoint) or all(
        _read(settings, name) == _read(defaults, name) for name in _CHECKED
    )


def _try_to_build(settings: Settings, use: str, names: dict[str, str], build: Callable[[], Any]) -> None:
    try:
        build()
    except RefusedSamplingError as error:
        # Where vLLM names no parameter, it may be any of them.
        refused = [names[error.parameter]] if error.parameter in names else list(names.values())
        given = ", ".join(f"{name} = {_read(settings, name)}" for name in refused)
        raise SettingsError(
            f"{given}: vLLM cannot sample so for {use} ({error}): set {' or '.join(refused)} to what vLLM takes"
        ) from None


def _read(settings: Settings, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _check_apart(settings: Settings) -> None:
    logging.disable()  # what vLLM logs when it is imported would be read as its answer
    os.environ.update(build_environment(settings.rollout.engine))
    check_sampling(settings)
