"""The environment of each data source: built in, or your own, in a process of its own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from forage_rollout.environments.environment import Environment, Episode
from forage_rollout.environments.loading import BUILT_IN, create_environment, explain_error
from forage_rollout.environments.remote import RemoteEnvironment
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings
from forage_runtime.settings.rollout import DEFAULT_ENVIRONMENT
from forage_sandbox.support import log_protections

T = TypeVar("T")
AnyEnvironment = Environment | RemoteEnvironment


class Environments:
    """The environment of each data source; `search` where the settings name none.

    Args:
        built_in: by name, with default parameters.
        by_data_source: those that the settings name.
    """

    def __init__(self, built_in: Mapping[str, Environment], by_data_source: Mapping[str, AnyEnvironment]) -> None:
        self._built_in = dict(built_in)
        self._by_data_source = dict(by_data_source)

    def select(self, data_source: str, name: str = "") -> AnyEnvironment:
        """The built-in environment of this name; without a name that of the data source."""
        return (
            self._built_in[name] if name else self._by_data_source.get(data_source, self._built_in[DEFAULT_ENVIRONMENT])
        )

    async def close(self) -> None:
        """Close the connections, files and processes of every environment."""
        for environment in (*self._built_in.values(), *self._by_data_source.values()):
            await environment.close()

    def kill(self) -> None:
        """End the processes of environments that were only to be checked."""
        _kill(self._by_data_source)


async def settle(value: T | Awaitable[T]) -> T:
    """The value, or what it becomes: environments in this process answer at once, others later."""
    return await value if inspect.isawaitable(value) else value


def build_name(environment: AnyEnvironment) -> str:
    """The name of an environment's class."""
    return environment.name if isinstance(environment, RemoteEnvironment) else type(environment).__name__


def end_episode(environment: AnyEnvironment, episode: Episode) -> None:
    """Let an environment forget a trajectory that has ended."""
    if isinstance(environment, RemoteEnvironment):
        environment.end(episode)


def load_environments(settings: Settings, retriever: RetrieverClient) -> Environments:
    """Load and check every environment of the settings. Your own get a process each, unless security.user_code is off.

    Raises:
        SettingsError: one cannot be loaded or is not an environment; names its data source and its file. Or
            security.user_code asks for more than this machine has.
    """
    rollout, mode = settings.rollout, settings.security.user_code
    own = {source: route for source, route in rollout.environments.items() if route.is_own}
    if own:
        log_protections("environment", own, mode)
    loaded: dict[str, AnyEnvironment] = {}
    for source, route in rollout.environments.items():
        try:
            if not route.is_own or mode == "off":
                loaded[source] = create_environment(route, rollout, retriever)
            else:
                loaded[source] = RemoteEnvironment(source, settings, retriever)
        except (Exception, SystemExit) as error:  # user code may raise anything
            _kill(loaded)
            raise SettingsError(f"rollout.environments.{source} ({route.name}): {explain_error(error)}") from error
    return Environments({name: kind(rollout, retriever) for name, kind in BUILT_IN.items()}, loaded)


def _kill(environments: Mapping[str, AnyEnvironment]) -> None:
    for environment in environments.values():
        if isinstance(environment, RemoteEnvironment):
            environment.kill()
