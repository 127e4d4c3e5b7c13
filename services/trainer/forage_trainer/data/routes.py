"""Checks that the other services know the data sources of the questions: their rewards and their environments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

import grpc

from forage_queue.streams.client import ENVIRONMENTS_SILENCE_S, StreamClient
from forage_records.questions import Questions, check_environments, check_routes
from forage_runtime.clients.reward import RewardClient
from forage_runtime.errors import UnavailableError, UserError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import Settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import Wait, waiting

_LOG_INTERVAL_S = 10.0
_PAUSE_S = 0.5
_PATIENCE_S = ENVIRONMENTS_SILENCE_S + 5.0  # a rollout service that has just ended may have declared what is found


def check_rewards(settings: Settings, questions: Mapping[str, Questions], stop: Stop, health: Health) -> None:
    """Compare the data sources of the questions with what the reward service serves.

    Waits for the service for as long as it takes: services start in any order.

    Args:
        questions: by the setting that names their files.

    Raises:
        UserError: a data source has no reward, or what answers is not the reward service.
        Stopped: the process was asked to stop meanwhile.
    """
    address = settings.reward.grpc_address
    routes = _wait_for_routes(settings, stop, health)
    for origin, those in questions.items():
        check_routes({one.data_source for one in those.rows}, routes, origin, f"the reward service at {address}")


class EnvironmentCheck:
    """The check that the rollout service gives each data source the environment of the trainer's settings.

    A rollout service declares its environments before it claims prompts. The trainer does not wait for that: it checks
    before it uses what arrived.
    """

    def __init__(
        self, settings: Settings, streams: StreamClient, questions: Iterable[Questions], retry: RedisRetry, stop: Stop
    ) -> None:
        self._wanted = settings.rollout.environment_names
        self._sources = {one.data_source for those in questions for one in those.rows}
        self._streams = streams
        self._retry = retry
        self._stop = stop

    def __call__(self) -> None:
        """Compare the settings with what the rollout service declares, if one runs.

        Raises:
            UserError: a data source gets another environment.
            Stopped: the process was asked to stop meanwhile.
        """
        began = time.monotonic()
        with waiting("the environments of the settings", on="rollout", limit_s=_PATIENCE_S) as wait:
            while (served := self._retry(self._streams.read_environments)) is not None:
                try:
                    return check_environments(self._sources, self._wanted, served)
                except UserError as error:
                    if time.monotonic() - began > _PATIENCE_S:
                        raise
                    wait.detail = str(error)
                    get_logger().warning("other_environment", detail=str(error))
                    self._stop.sleep(_PAUSE_S)


def _wait_for_routes(settings: Settings, stop: Stop, health: Health) -> frozenset[str]:
    why = "without rewards there is nothing to train on; a stop request ends it"
    with waiting("the data sources", on="reward", limit_s=None, why_unlimited=why) as wait:
        return _ask_for_routes(settings, stop, health, wait)


def _ask_for_routes(settings: Settings, stop: Stop, health: Health, wait: Wait) -> frozenset[str]:
    began = time.monotonic()
    log_at = 0.0
    while True:
        stop.check()
        try:
            routes = asyncio.run(_list_routes(settings))
        except UnavailableError as error:
            wait.detail = str(error)
            health.wait_for("reward", str(error))
            waited = time.monotonic() - began
            if waited >= log_at:
                get_logger().warning("reward_unavailable", waited_s=round(waited, 1), reason=str(error))
                log_at = waited + _LOG_INTERVAL_S
            stop.sleep(_PAUSE_S)  # wait: named by the caller
        except grpc.RpcError as error:
            raise UserError(
                f"{settings.reward.grpc_address} answers, but not as a reward service ({error.code().name}): "
                "give the service's address in reward.grpc_address"
            ) from error
        else:
            health.mark_ready("reward")
            return routes


async def _list_routes(settings: Settings) -> frozenset[str]:
    client = RewardClient(settings)
    try:
        return await client.list_data_sources()
    finally:
        await client.close()
