"""vLLM's engine arguments: those that Forage sets, and those of `rollout.engine.args`, which are checked here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from types import GenericAlias
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from forage_runtime.errors import SettingsError
from forage_runtime.files.served_lora import get_served_lora_rank
from forage_runtime.files.socket_folder import find_socket_folder
from forage_runtime.settings import EngineSettings, Settings
from forage_runtime.telemetry.logs import get_logger
from forage_weights.rollout.adapter import build_engine_arguments

log = get_logger()
_BATCHED_TOKENS_CPU = 4096
BLOCK_SIZE = 32
"""Tokens of a block of the KV cache: what turns of a trajectory share is shared in whole blocks, so larger ones leave
more of it to compute again; vLLM's own 16 has its scheduler count twice as many."""
_SETTINGS = {
    "data_parallel_size": "rollout.engine_replicas.min",
    "dtype": "rollout.engine.dtype",
    "enable_lora": "rollout.engine.max_lora_rank",
    "enable_sleep_mode": "trainer.placement",
    "gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "max_cpu_loras": "rollout.engine.max_lora_rank",
    "max_lora_rank": "rollout.engine.max_lora_rank",
    "max_loras": "rollout.engine.max_lora_rank",
    "max_model_len": "rollout.engine.max_model_len",
    "max_num_seqs": "rollout.engine.max_num_seqs",
    "model": "model.path",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.engine.tensor_parallel_size",
    "tokenizer": "model.path",
}
"""Argument → the setting of Forage that sets it."""
_PLACED = "Forage places replicas itself, each on the GPUs of rollout.engine.tensor_parallel_size"
_REFUSED = {
    "convert": "engines generate",
    "device_ids": _PLACED,
    "disable_log_stats": "Forage counts itself",
    "distributed_executor_backend": _PLACED,
    "enable_elastic_ep": _PLACED,
    "enable_log_requests": "prompts do not belong in a log",
    "logprobs_mode": "the trainer needs log-probabilities of the distribution that was sampled from",
    "nnodes": _PLACED,
    "node_rank": _PLACED,
    "pipeline_parallel_size": _PLACED,
    "prefill_context_parallel_size": _PLACED,
    "runner": "engines generate",
    "scheduler_cls": "Forage's scheduler lets a new policy be checked before it serves",
    "skip_tokenizer_init": "stop texts need the tokenizer",
    "worker_cls": "Forage's worker puts new policies in place",
    "worker_extension_cls": "Forage's worker puts new policies in place",
}
"""Argument → why no value of it can be given."""
_ROUNDED = "log-probabilities will differ from the trainer's"
_OTHER_MODEL = "the engine computes another model than the trainer"
_OTHER_TOKENS = "tokens are not drawn from the distribution that the trainer scores"
_MOVED = "that new policies are loaded correctly into weights that vLLM moves is not tested"
_INEXACT = {
    "cpu_offload_gb": _MOVED,
    "diffusion_config": _OTHER_TOKENS,
    "enable_eplb": _MOVED,
    "hf_overrides": _OTHER_MODEL,
    "kv_cache_dtype": f"keys and values are rounded: {_ROUNDED}",
    "logits_processors": _OTHER_TOKENS,
    "mamba_cache_dtype": f"states are rounded: {_ROUNDED}",
    "mamba_ssm_cache_dtype": f"states are rounded: {_ROUNDED}",
    "model_class_overrides": _OTHER_MODEL,
    "offload_group_size": _MOVED,
    "quantization": f"weights are rounded: {_ROUNDED}",
    "quantization_config": f"weights are rounded: {_ROUNDED}",
    "spec_method": f"the draft does not learn with the policy, and {_ROUNDED}",
    "spec_model": f"the draft does not learn with the policy, and {_ROUNDED}",
    "speculative_config": f"the draft does not learn with the policy, and {_ROUNDED}",
    "watermark_config": _OTHER_TOKENS,
}
"""Argument → what a value of it does to exactness. Allowed: `rollout_correction` weighs what the engine sampled."""


def prepare_repeatable(cpu: bool, settings: EngineSettings) -> dict[str, Any]:
    """Set vLLM's environment for a repeatable run, and return its arguments: tokens then depend on their request alone.

    Sums of floating-point numbers depend on their order, and kernels choose it by the shape of a batch: by how many
    sequences run at once, and by how many tokens of a context are still to be computed.

    Raises:
        SettingsError: a CPU shall sample several sequences at once; its kernels have no other way.
    """
    if not cpu:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    elif settings.max_num_seqs > 1:
        raise SettingsError(
            f"on a CPU run.repeatable needs rollout.engine.max_num_seqs=1, not {settings.max_num_seqs}: "
            "engines sample one sequence at a time"
        )
    return {"enable_prefix_caching": False}


def build_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables for vLLM; they must be set before it is imported."""
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TQDM_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_cache_gib))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        # Sockets between vLLM's processes, each named by a UUID.
        "VLLM_RPC_BASE_PATH": str(find_socket_folder("12345678-1234-1234-1234-123456789012")),
    }


def build_arguments(settings: Settings, cpu: bool) -> dict[str, Any]:
    """All arguments of an engine on this kind of device.

    Raises:
        SettingsError: as `check_arguments` and `prepare_repeatable`; or an argument is of no use on a CPU.
    """
    engine, given = settings.rollout.engine, check_arguments(settings.rollout.engine.args)
    arguments: dict[str, Any] = {
        "model": str(Path(settings.model.path).resolve()),
        "dtype": engine.dtype,
        # Without a GPU there is nothing to capture, and to compile takes longer than it saves.
        "enforce_eager": cpu,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "block_size": BLOCK_SIZE,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "seed": settings.run.seed,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enable_log_requests": False,
        "scheduler_cls": "forage_weights.rollout.canary_scheduler.build_scheduler",
        "worker_extension_cls": "forage_rollout.engine.worker_extension.WorkerExtension",
    }
    if settings.trainer.placement == "colocated" and not cpu:
        arguments["enable_sleep_mode"] = True  # on a CPU vLLM goes through the same motions and frees nothing
    if cpu:
        if given.get("enable_chunked_prefill"):
            raise SettingsError(
                "rollout.engine.args.enable_chunked_prefill = true needs a GPU: on a CPU a seeded request whose prompt "
                "is split ends the engine; leave it out"
            )
        tokens = max(engine.max_model_len, _BATCHED_TOKENS_CPU)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        # On CPU half precision is slower, and its logprobs differ more from the trainer's.
        if engine.dtype == "auto":
            arguments["dtype"] = "float32"
    arguments |= given
    if settings.run.repeatable:
        arguments |= prepare_repeatable(cpu, engine)
    return arguments | build_engine_arguments(get_served_lora_rank(settings))


def is_exact(settings: EngineSettings) -> bool:
    """Whether no argument of the user's makes the engine compute otherwise than the trainer."""
    return not settings.args.keys() & _INEXACT


def check_before_start(settings: EngineSettings) -> None:
    """`check_arguments` in a process of its own: vLLM's list is in modules of half a gigabyte.

    Raises:
        SettingsError: as `check_arguments`.
    """
    if not settings.args:
        return
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(_check_apart, settings).result()
    for name, why in _INEXACT.items():
        if name in settings.args:
            log.warning("inexact_engine_argument", argument=f"rollout.engine.args.{name}", reason=why)


def check_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the user's arguments by vLLM's own list of names and types; returns them as vLLM takes them.

    Raises:
        SettingsError: a name is unknown or Forage's to set, or a value is of the wrong type.
    """
    if not given:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")}
    types = _read_types(AsyncEngineArgs)
    return {name: _check_argument(name, value, names, types) for name, value in given.items()}


def _check_apart(settings: EngineSettings) -> None:
    os.environ.update(build_environment(settings))
    check_arguments(settings.args)


def _read_types(of: type) -> dict[str, Any]:
    """The types of a class's attributes; those that are imported for type checkers alone are `Any`."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(of, localns=unknown)
        except NameError as error:
            unknown[str(error.name)] = Any


def _check_argument(name: str, value: Any, names: set[str], types: Mapping[str, Any]) -> Any:
    where = f"rollout.engine.args.{name}"
    if name not in names:
        near = difflib.get_close_matches(name, sorted(names), n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise SettingsError(f"{where} is no argument of vLLM's AsyncEngineArgs{meant}")
    if name in _SETTINGS:
        raise SettingsError(f"{where} is set by {_SETTINGS[name]}: set that instead")
    if name in _REFUSED or name.startswith(("data_parallel_", "master_")):
        raise SettingsError(f"{where} cannot be set: {_REFUSED.get(name, _PLACED)}; leave it out")
    if name == "load_format" and str(value).lower() == "dummy":
        raise SettingsError(f"{where} = dummy would sample from random weights until the first policy; leave it out")
    one: Any = GenericAlias(dict, (str, types[name]))
    adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(one, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        taken = adapter.validate_python({name: value})[name]
    except ValidationError as error:
        found = error.errors()[0]
        within = value if isinstance(value, dict) else ()
        part = ".".join(str(step) for step in found["loc"] if step == name or step in within)
        raise SettingsError(
            f"rollout.engine.args.{part} = {found['input']!r} is no value for vLLM: {found['msg']}"
        ) from None
    # vLLM makes its own objects of mappings.
    return value if isinstance(value, dict) else taken
