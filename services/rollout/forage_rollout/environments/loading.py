"""Loads an environment of the settings: built in, or your own from a file or a package; and checks it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

from forage_rollout.environments.environment import Environment
from forage_rollout.environments.external import NOT_DRAINED, External
from forage_rollout.environments.search import Search
from forage_rollout.environments.single_turn import SingleTurn
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import ForageError
from forage_runtime.settings import EnvironmentRoute, RolloutSettings
from forage_runtime.user_code import load_object

BUILT_IN: Mapping[str, type[Environment]] = {
    "search": Search,
    "single_turn": SingleTurn,
    "external": External,
}
EXPECTED = f"one of {', '.join(BUILT_IN)}; or nothing = that of the data source"
"""Valid values of a prompt's `environment`, for error messages."""
_TAG = re.compile(r"[A-Za-z][\w-]*")


def create_environment(route: EnvironmentRoute, rollout: RolloutSettings, retriever: RetrieverClient) -> Environment:
    """Load, create and check one environment.

    Raises:
        UserCodeError: there is no such code, or it raised while it was loaded.
        ValueError: it is not an environment; the message says what was expected.
        Exception, SystemExit: whatever its own code raised.
    """
    environment = _find_class(route)(rollout, retriever, **route.params)
    if isinstance(environment, External) and rollout.weights.update == "drain":
        raise ValueError(NOT_DRAINED)
    _check_environment(environment)
    return environment


def explain_error(error: BaseException) -> str:
    """Why an environment could not be created; a ValueError and an error of ours are sentences already."""
    return str(error) if isinstance(error, ValueError | ForageError) else f"{type(error).__name__}: {error}"


def _find_class(route: EnvironmentRoute) -> type[Environment]:
    if not route.is_own:
        if route.name not in BUILT_IN:
            others = "or one of your own, FILE.py:CLASS or MODULE:CLASS"
            raise ValueError(f"no environment has this name: expected one of {', '.join(BUILT_IN)}, {others}")
        return BUILT_IN[route.name]
    kind = load_object(route.name)
    if not (inspect.isclass(kind) and issubclass(kind, Environment)):
        raise ValueError(f"'{route.name}' is {kind!r}: expected a subclass of {Environment.__qualname__}")
    return kind


def _check_environment(environment: Environment) -> None:
    if not inspect.iscoroutinefunction(environment.respond):
        raise ValueError("respond is not a coroutine function: write 'async def respond(self, action, episode)'")
    check_description(environment.tags, environment.feedback, environment.max_turns, environment.stops)


def check_description(tags: object, feedback: object, turns: object, stops: object) -> None:
    """Check what an environment says of itself; see `Environment`.

    Raises:
        ValueError: one of them is wrong.
    """
    if not isinstance(tags, tuple) or not tags or not all(isinstance(t, str) and _TAG.fullmatch(t) for t in tags):
        raise ValueError(f"tags is {tags!r}: expected a tuple of names such as ('search', 'answer')")
    if not isinstance(feedback, str):
        raise ValueError(f"feedback is {feedback!r}: expected a string")
    if not isinstance(turns, int) or isinstance(turns, bool) or turns < 0:
        raise ValueError(f"max_turns is {turns!r}: expected 0 or more turns")
    if not isinstance(stops, tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stops is {stops!r}: expected a tuple of strings")
