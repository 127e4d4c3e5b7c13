"""Finds the operator's function, calls it, and holds it to its contract.

    score(view: TrajectoryView, truth: GroundTruth, params: dict) -> float | dict[str, float]

A number is the total. A dict holds components: the total is their sum, without those whose name starts with "_".
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from forage_common.errors import UserError
from forage_reward.score import Component, Score, Status, refused, scored
from forage_reward.trajectory import GroundTruth, TrajectoryView

GROUP = "forage.rewards"
MAX_COMPONENTS = 64
UserFunction = Callable[[TrajectoryView, GroundTruth, Mapping[str, object]], object]


class ContractError(TypeError):
    """The function gave something that is no score; the message says what."""


def load_function(path: str, entry_point: str, function: str) -> UserFunction:
    """The function of a file, of `module:function`, or of a name in the entry point group `forage.rewards`.

    Raises:
        UserError: nothing is there, it cannot be imported, or it is no function.
    """
    source = path or entry_point
    try:
        found = _from_file(Path(path), function) if path else _from_entry_point(entry_point)
    except UserError:
        raise
    except BaseException as error:  # noqa: BLE001 - foreign code at import may raise anything, SystemExit included
        raise UserError(f"{source} cannot be loaded ({type(error).__name__}: {error}): correct it") from None
    if not callable(found):
        raise UserError(f"{source} gives {found!r}, which is no function")
    return found  # type: ignore[no-any-return]


def _from_file(path: Path, function: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"forage_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"{path} is not a Python file: give an existing .py file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, function):
        raise UserError(f"{path} has no function '{function}': define it, or set `function`")
    return getattr(module, function)


def _from_entry_point(name: str) -> Any:
    if ":" in name:
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise UserError(f"no installed package has '{name}' in {GROUP} (known: {', '.join(sorted(known)) or 'none'})")
    return known[name].load()


def judged(
    name: str, function: UserFunction, view: TrajectoryView, truth: GroundTruth, params: Mapping[str, object]
) -> Score:
    """Call the function. What it raises and what breaks the contract becomes INTERNAL; never a 0.

    Raises:
        MemoryError: the function needs more than it may have.
    """
    try:
        components = components_of(function(view, truth, params))
    except MemoryError:
        raise
    except ContractError as error:
        return refused(Status.INTERNAL, name, str(error))
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is reported as a status
        return refused(Status.INTERNAL, name, f"raised {type(error).__name__}: {error}"[:500])
    score = scored(name, components, "scored by user code")
    if not math.isfinite(score.total):
        return refused(Status.INTERNAL, name, f"its components add up to {score.total}")
    return score


def components_of(found: object) -> tuple[Component, ...]:
    """The components of what a function returned.

    Raises:
        ContractError: it is neither a finite number nor a dict of such.
    """
    if isinstance(found, Mapping):
        if len(found) > MAX_COMPONENTS:
            raise ContractError(f"returned {len(found)} components, allowed are {MAX_COMPONENTS}")
        pairs = [(key, _number(value, f"component {key!r}")) for key, value in found.items()]
    else:
        pairs = [("score", _number(found, "value"))]
    for key, _ in pairs:
        if not isinstance(key, str) or not 0 < len(key) <= 100:
            raise ContractError(f"returned a component called {key!r:.100}: names are texts of 1 to 100 characters")
    return tuple(Component(key, value, 0.0 if key.startswith("_") else value) for key, value in pairs)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ContractError(f"returned a {type(value).__name__} as {what}: return a number or a dict of numbers")
    number = float(value)
    if not math.isfinite(number):
        raise ContractError(f"returned {number} as {what}: return finite numbers")
    return number
