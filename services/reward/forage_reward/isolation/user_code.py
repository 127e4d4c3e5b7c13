"""Loads a user's reward function, calls it, and checks what it returns.

    score(view: TrajectoryView, truth: GroundTruth, params: dict) -> float | dict[str, float]

A number is the total, and so is a bool: 1 or 0. A dict holds components, and the total is the sum of those whose name
does not start with "_".
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from decimal import Decimal
from importlib.metadata import entry_points
from typing import Any

from forage_reward.score import Component, Score, Status, sum_components, withhold_score
from forage_reward.trajectory import GroundTruth, TrajectoryView
from forage_runtime.errors import UserError
from forage_runtime.user_code import UserCodeError, load_object, name_errors
from forage_sandbox.confinement import Confinement
from forage_sandbox.explanations import explain

GROUP = "forage.rewards"
MAX_COMPONENTS = 64
MAX_DETAIL = 10_000
UserFunction = Callable[[TrajectoryView, GroundTruth, Mapping[str, object]], object]


class ContractError(TypeError):
    """The function returned something that is not a score; the message says what."""


def load_function(source: str, confinement: Confinement) -> UserFunction:
    """Load FILE.py:FUNCTION, MODULE:FUNCTION, or a name in the entry point group `forage.rewards`.

    Raises:
        UserError: it does not exist, cannot be imported, or is not a function.
    """
    try:
        loaded = load_object(source) if ":" in source else _load_installed(source)
    except UserCodeError as error:
        raise UserError(f"{error}{explain(error, confinement)}") from None
    if not callable(loaded):
        raise UserError(f"'{source}' is {loaded!r:.100}: expected a function")
    return loaded  # type: ignore[no-any-return]


def _load_installed(name: str) -> Any:
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise UserError(f"no installed package has '{name}' in {GROUP} (known: {', '.join(sorted(known)) or 'none'})")
    with name_errors(name):
        return known[name].load()


def call_user_function(
    name: str,
    function: UserFunction,
    view: TrajectoryView,
    truth: GroundTruth,
    params: Mapping[str, object],
    confinement: Confinement,
) -> Score:
    """Call the function. An exception or an invalid result becomes INTERNAL, never a 0.

    Raises:
        MemoryError: the function exceeds its memory limit.
    """
    try:
        components = read_components(function(view, truth, params))
    except MemoryError:
        raise
    except ContractError as error:
        return withhold_score(Status.INTERNAL, name, str(error))
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; it is reported as a status
        why = f"raised {type(error).__name__}: {error}"[:500]
        return withhold_score(Status.INTERNAL, name, f"{why}{explain(error, confinement)}")
    score = sum_components(name, components, "scored by user code")
    if not math.isfinite(score.total):
        return withhold_score(Status.INTERNAL, name, f"its components add up to {score.total}")
    return score


def read_components(result: object) -> tuple[Component, ...]:
    """Read the components from what a function returned.

    Raises:
        ContractError: it is neither a finite number nor a dict of finite numbers.
    """
    if isinstance(result, Mapping):
        if len(result) > MAX_COMPONENTS:
            raise ContractError(f"returned {len(result)} components, allowed are {MAX_COMPONENTS}")
        pairs = [(key, _check_number(value, f"component {key!r}")) for key, value in result.items()]
    else:
        pairs = [("score", _check_number(result, "value"))]
    for key, _ in pairs:
        if not isinstance(key, str) or not 0 < len(key) <= 100:
            raise ContractError(f"returned a component called {key!r:.100}: names are strings of 1 to 100 characters")
    return tuple(Component(key, value, 0.0 if key.startswith("_") else value) for key, value in pairs)


def check_score(name: str, score: Score) -> None:
    """Check a score that came from a process of user code, which may have sent another than `call_user_function` makes.

    Raises:
        ContractError: it has.
    """
    numbers = [score.total, *(number for part in score.components for number in (part.raw, part.weighted))]
    names = [part.name for part in score.components]
    if score.reward != name or len(names) > MAX_COMPONENTS or len(score.detail) > MAX_DETAIL:
        raise ContractError("its score is of another reward, or too long")
    if not all(map(math.isfinite, numbers)) or not all(0 < len(one) <= 100 for one in names):
        raise ContractError("its score has numbers or names that no reward may return")


def _check_number(value: object, name: str) -> float:
    kind = type(value).__name__
    if getattr(value, "ndim", None) == 0:  # a number of NumPy or PyTorch, neither of which is installed here
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, numbers.Real | Decimal):
        raise ContractError(f"returned a {kind} as {name}: return a number or a dict of numbers")
    number = float(value)
    if not math.isfinite(number):
        raise ContractError(f"returned {number} as {name}: return finite numbers")
    return number
