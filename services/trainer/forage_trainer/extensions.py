"""Functions of the user's own in the trainer: an estimator, a policy loss, a sampler of questions.

They run in the trainer's process with its rights, as a fork's would; rewards and environments, which see the model's
text, have processes of their own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import Settings

Function = Callable[..., Any]


class ExtensionError(UserError):
    """A function of the user's own raised, or gave something else than it must."""


@functools.cache
def load_function(setting: str, source: str) -> Function:
    """Load a function.

    Args:
        setting: the name of the setting, for errors.
        source: FILE.py:FUNCTION or MODULE:FUNCTION; a file is relative to the working directory.

    Raises:
        SettingsError: it cannot be loaded, or is no function.
    """
    place, _, name = source.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name, None)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{setting} = '{source}' cannot be loaded ({why}): correct it") from error
    if not callable(found):
        has = f"has no function '{name}'" if found is None else f"has '{name}', which is no function"
        raise SettingsError(f"{setting} = '{source}': {place} {has}: define it, or name another")
    function: Function = found

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            raise ExtensionError(f"{setting} = '{source}' raised {type(error).__name__}: {error}") from error

    return call


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"forage_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} is no file in {Path.cwd()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe_given(value: Any) -> str:
    """What a function gave, in a few words on one line."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {' '.join(repr(value).split())[:80]}"


def check_functions(settings: Settings) -> None:
    """Load every function that the settings name, before minutes are spent on a model.

    Raises:
        SettingsError: as `load_function`.
    """
    named = {
        "trainer.algorithm.estimator": settings.trainer.algorithm.estimator,
        "trainer.actor.policy_loss.function": settings.trainer.actor.policy_loss.function,
        "data.sampler": settings.data.sampler,
    }
    for setting, source in named.items():
        if source:
            load_function(setting, source)


def find_sampler(settings: Settings) -> Function | None:
    """Find the sampler that the settings name; None where they name none.

    Raises:
        SettingsError: as `load_function`.
    """
    return load_function("data.sampler", settings.data.sampler) if settings.data.sampler else None
