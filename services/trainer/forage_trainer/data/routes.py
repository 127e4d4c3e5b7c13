"""The check that the reward service scores every data source of the questions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import grpc

from forage_common.clients.reward import RewardClient
from forage_common.errors import UnavailableError, UserError
from forage_common.files.questions import Questions, check_routes
from forage_common.settings import Settings
from forage_common.stop import Stop
from forage_common.telemetry.health import Health
from forage_common.telemetry.logs import get_logger

_LOG_INTERVAL_S = 10.0
_PAUSE_S = 0.5


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


def _wait_for_routes(settings: Settings, stop: Stop, health: Health) -> frozenset[str]:
    began = time.monotonic()
    log_at = 0.0
    while True:
        stop.check()
        try:
            routes = asyncio.run(_list_routes(settings))
        except UnavailableError as error:
            health.wait_for("reward", str(error))
            waited = time.monotonic() - began
            if waited >= log_at:
                get_logger().warning("reward_unavailable", waited_s=round(waited, 1), reason=str(error))
                log_at = waited + _LOG_INTERVAL_S
            stop.sleep(_PAUSE_S)
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
