"""The checks of the rollout service before it starts: before Ray runs and an engine is built."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial

from forage_rollout.deployments.devices import count_gpus
from forage_rollout.engine import sampling_check
from forage_rollout.environments import load_environments
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.loop.trajectory_builder import Limits
from forage_rollout.vllm_start import vllm_args
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import SettingsError
from forage_runtime.files.model_folder import check_model_folder, read_context
from forage_runtime.problems import Check, list_common_checks, run_checks
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import Settings


def list_checks(settings: Settings) -> Iterator[Check]:
    """List the checks of the settings and of the files that they name; no other server is called."""
    rollout = settings.rollout
    yield from list_common_checks(settings, "rollout service", "rollout", "retriever", "reward")
    yield partial(_check_model, settings)
    yield partial(_check_context, settings)
    if settings.model.path.is_dir():  # else `_check_model` says so
        yield partial(_check_positions, settings)
    yield from (partial(_check_environment, settings, source) for source in rollout.environments)
    yield lambda: vllm_args.check_before_start(rollout.engine)
    yield lambda: sampling_check.check_before_start(settings)
    yield lambda: count_gpus(rollout)
    yield lambda: RunSignatures.verifying(settings.security, settings.run.id)


def _check_model(settings: Settings) -> None:
    """Its folder, and then the limits, which its tokenizer measures."""
    check_model_folder(settings.model.path, weights=not settings.rollout.engine.endpoint)
    Limits.from_settings(settings.rollout, FileTokenizer(settings.model.path))


def _check_context(settings: Settings) -> None:
    rollout = settings.rollout
    prompt, response, longest = rollout.max_prompt_length, rollout.max_response_length, rollout.engine.max_model_len
    if response < longest < prompt + response:  # a longer response is named by `Limits`
        raise SettingsError(
            f"rollout.max_prompt_length = {prompt} and rollout.max_response_length = {response} make a context of "
            f"{prompt + response} tokens, and rollout.engine.max_model_len = {longest} is the most of the engine: "
            f"raise it to {prompt + response}, or lower the others"
        )
    if rollout.max_start_length > prompt:
        raise SettingsError(
            f"rollout.max_start_length = {rollout.max_start_length} is more than rollout.max_prompt_length = {prompt}, "
            "so the first turn would not see the beginning of its prompt: raise the latter"
        )


def _check_positions(settings: Settings) -> None:
    """vLLM refuses a longer context too, but only when an engine starts."""
    engine = settings.rollout.engine
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true")  # as vLLM reads it
    if engine.endpoint or "hf_overrides" in engine.args or allowed:
        return
    most = read_context(settings.model.path)
    if most is not None and engine.max_model_len > most:
        raise SettingsError(
            f"rollout.engine.max_model_len = {engine.max_model_len} is more than the {most} tokens of "
            f"{settings.model.path}: lower it, and rollout.max_prompt_length + rollout.max_response_length, to {most}"
        )


def _check_environment(settings: Settings, source: str) -> None:
    one = {source: settings.rollout.environments[source]}
    rollout = settings.rollout.model_copy(update={"environments": one})
    alone = settings.model_copy(update={"rollout": rollout})
    load_environments(alone, RetrieverClient.from_settings(alone)).kill()


if __name__ == "__main__":
    logging.disable()  # what vLLM logs when it is imported
    run_checks(list_checks)
