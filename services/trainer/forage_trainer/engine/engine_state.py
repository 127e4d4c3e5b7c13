"""The state of verl's engines in files: model, optimizer, learning-rate schedule, random state.

Learning rate, its course and weight decay are no state: a run goes on under those of its settings. Any number of
processes loads what any other number wrote, except the random state, of which each process has its own.

Layout: `model/` and `optimizer/` (see `weights.shards`; moments are named `<parameter>.<moment>`), `schedule.json` with
the step of the learning rate's course and the updates of each parameter, `random_rank_<rank>.json`, `huggingface/`
with the model's configuration and tokenizer, and what an export needs besides: `model_meta.json` with the model's class
and the conversions that it was loaded with, and `lora_train_meta.json` with PEFT's configuration of an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from verl.utils.device import get_device_name

from forage_runtime.errors import DataError
from forage_runtime.files.folders import write_json
from forage_trainer.weights.adapter import describe_adapter
from forage_trainer.weights.checkpoint_tensors import get_base, list_conversions
from forage_trainer.weights.shards import ANOTHER, describe_parts, load_parts, write_part
from forage_weights.trainer.model_files import CONFIGURATION, LORA_META, MODEL_META, copy_configuration

MODEL, OPTIMIZER = "model", "optimizer"
_SHARDED = "FSDP"
"""What PyTorch puts before the name of a class whose parameters it shards."""
_SCHEDULE, _RANDOM = "schedule.json", "random_rank_{rank}.json"


def save_engine(engine: Any, folder: Path, rank: int) -> None:
    """Write this process's part of an engine's state.

    Raises:
        OSError: the disk is full or fails.
    """
    reshard(engine.module)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # verl's copies of offloaded tensors to the host are asynchronous
    write_part(folder / MODEL, _list_weights(engine.module), rank)
    write_part(folder / OPTIMIZER, _list_moments(engine), rank)
    (folder / _RANDOM.format(rank=rank)).write_text(json.dumps(_get_random_state()), encoding="utf-8")
    if rank:
        return
    write_json(folder / _SCHEDULE, {"step": engine.lr_scheduler.last_epoch, "counts": _list_counts(engine)})
    (folder / CONFIGURATION).mkdir(exist_ok=True)
    copy_configuration(Path(engine.model_config.local_path), folder / CONFIGURATION)
    family = type(get_base(engine.module)).__name__.removeprefix(_SHARDED)
    write_json(folder / MODEL_META, {"class": family, "conversions": list_conversions(engine.module)})
    if adapters := getattr(engine.module, "peft_config", None):
        write_json(folder / LORA_META, describe_adapter(next(iter(adapters.values()))))


def load_engine(engine: Any, folder: Path, rank: int) -> None:
    """Load a state of `save_engine`.

    Raises:
        DataError: it is of another model, or not complete.
    """
    with _parameters_on_device(engine):
        load_parts(folder / MODEL, _list_weights(engine.module))
        _load_optimizer(engine, folder)
    states = len(list(folder.glob(_RANDOM.format(rank="*"))))
    _set_random_state(json.loads((folder / _RANDOM.format(rank=rank % states)).read_text(encoding="utf-8")))


@contextmanager
def _parameters_on_device(engine: Any) -> Iterator[None]:
    """Hold offloaded parameters on the device: moments are created where their parameters are."""
    reshard(engine.module)
    if engine.is_param_offload_enabled:
        engine.to(get_device_name(), model=True, optimizer=False, grad=False)
    yield
    if engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)
    if engine.is_optimizer_offload_enabled:
        engine.to("cpu", model=False, optimizer=True, grad=False)


def reshard(module: torch.nn.Module) -> None:
    """Put the shards, which the optimizer knows, in the place of copies that a forward pass has gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _list_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """List parameters and buffers, a tied parameter once."""
    every = dict(module.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(module.named_parameters()).keys()
    return {name: tensor.detach() for name, tensor in module.state_dict().items() if name not in tied}


def _list_state(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `<parameter>.<kind>` and value of everything that the optimizer knows of parameters."""
    for name, parameter in engine.module.named_parameters():
        for kind, value in engine.optimizer.state.get(parameter, {}).items():
            yield f"{name}.{kind}", value


def _list_moments(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in _list_state(engine) if value.ndim}


def _list_counts(engine: Any) -> dict[str, float]:
    """The numbers of updates that parameters have had."""
    return {name: float(value) for name, value in _list_state(engine) if not value.ndim}


def _load_optimizer(engine: Any, folder: Path) -> None:
    """Replace the optimizer's state: a parameter that had none in the checkpoint, such as a frozen one, has none."""
    saved = json.loads((folder / _SCHEDULE).read_text(encoding="utf-8"))
    parameters = dict(engine.module.named_parameters())
    found = describe_parts(folder / OPTIMIZER)
    if strange := {name.rpartition(".")[0] for name in [*found, *saved["counts"]]} - parameters.keys():
        raise DataError(f"{folder / OPTIMIZER} is of {min(strange)}, which the model lacks: {ANOTHER}")
    moments = {
        name: torch.zeros_like(parameters[name.rpartition(".")[0]].detach(), dtype=one.properties.dtype)
        for name, one in found.items()
    }
    load_parts(folder / OPTIMIZER, moments)
    counts = {name: torch.tensor(value, dtype=torch.float32) for name, value in saved["counts"].items()}
    engine.optimizer.state.clear()
    for name, value in (counts | moments).items():
        parameter, _, kind = name.rpartition(".")
        engine.optimizer.state[parameters[parameter]][kind] = value
    _set_step(engine, saved["step"])


def _set_step(engine: Any, step: int) -> None:
    """Go on at a step of the schedule that the settings describe, which may have changed since."""
    schedule = engine.lr_scheduler
    schedule.last_epoch, schedule._step_count = step, step + 1
    rates = [base * scale(step) for base, scale in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def _get_random_state() -> dict[str, str]:
    """PyTorch's. Nothing that is trained uses Python's or numpy's, and Python's makes the ids of traces."""
    state = {"cpu": bytes(torch.get_rng_state().tolist()).hex()}
    if torch.cuda.is_available():
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return state


def _set_random_state(state: dict[str, str]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cpu"]), dtype=torch.uint8))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
