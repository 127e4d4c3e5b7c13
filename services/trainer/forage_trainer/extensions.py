"""Functions of the user's own in the trainer: an estimator, a policy loss, a sampler of questions.

They run in the trainer's process with its rights, as a fork's would; rewards and environments, which see the model's
text, have processes of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import Settings
from forage_runtime.user_code import UserCodeError, load_object

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
    try:
        function: Function = load_object(source)
    except UserCodeError as error:
        raise SettingsError(f"{setting} = {error}") from error
    if not callable(function):
        raise SettingsError(f"{setting} = '{source}' is {function!r:.100}: expected a function")

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            raise ExtensionError(f"{setting} = '{source}' raised {type(error).__name__}: {error}") from error

    return call


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
        "trainer.actor.policy_loss.loss_mode": settings.trainer.actor.policy_loss.function,
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
