"""Keeps an engine on the policy that the trainer announced last, and tells the trainer which one is served."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import NoReturn

from forage_common.errors import UnavailableError
from forage_common.streams import history
from forage_common.streams.client import StreamClient
from forage_common.telemetry.logs import get_logger
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.engine.vllm_engine import VllmEngine
from forage_rollout.weights.policy import PolicyError, describe_policy, is_newer

log = get_logger()
POLL_INTERVAL_S = 0.1
RETRY_INTERVAL_S = 1.0
HEARTBEAT_INTERVAL_S = 5.0
MAX_REFUSALS = 3
CATCH_UP_TIMEOUT_S = 60.0


async def catch_up(streams: StreamClient, engine: VllmEngine, timeout_s: float = CATCH_UP_TIMEOUT_S) -> None:
    """Return once the engine serves the announced policy, or none is announced.

    A policy that cannot be loaded within `timeout_s` leaves the engine out of service; `follow_policy` keeps trying.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await asyncio.to_thread(streams.declare_dtype, engine.dtype)
            announced = await asyncio.to_thread(streams.read_policy)
            if announced is None or announced == engine.serving:
                return
            await _load_recorded(streams, engine, announced)
        except PolicyError as error:
            log.error("policy_refused", detail=str(error))
            if time.monotonic() > deadline:
                engine.out_of_service = str(error)
                return
            await asyncio.sleep(RETRY_INTERVAL_S)  # wait: an engine that starts has no snapshot; its log says why
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_INTERVAL_S)  # wait: an engine that starts has no snapshot; its log says why


async def follow_policy(streams: StreamClient, engine: VllmEngine, replica: str) -> None:
    """Load each policy that is announced, and acknowledge what is served; never returns, survives an unavailable Redis.

    An announced policy that cannot be loaded `MAX_REFUSALS` times takes the engine out of service: its trajectories
    would become too stale for the trainer, and another engine may be able to load it.
    """
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_load_announced(streams, engine))
        # A task of its own: a load may wait for a long group, and a replica without heartbeats counts as gone.
        tasks.create_task(_acknowledge(streams, engine, replica))


async def _load_announced(streams: StreamClient, engine: VllmEngine) -> NoReturn:
    """Load every announcement that differs from the one before, whatever its epoch and version.

    The trainer decides what is served: after a lost Redis volume its epochs may begin lower than what an engine serves.
    An announcement that stays the same does not replace what `UpdateWeights` has loaded meanwhile.
    """
    followed = kept = engine.serving
    refused: Policy | None = None
    refusals = 0
    while True:
        try:
            # Polled, not pushed: an engine that misses a message would serve an old policy without knowing.
            announced = await asyncio.to_thread(streams.read_policy)
            if announced is not None and announced != followed:
                # A policy that `UpdateWeights` loaded after the refusal of the announced one takes its place.
                was_replaced = announced == refused and engine.serving is not kept
                if announced != engine.serving and not was_replaced:
                    await _load(streams, engine, announced)
                followed = announced
        except PolicyError as error:
            if announced != refused:  # log each refused policy once, not at each attempt
                log.error("policy_refused", detail=str(error))
                refused, refusals = announced, 0
            kept = engine.serving
            refusals += 1
            if refusals >= MAX_REFUSALS and not engine.out_of_service:
                engine.out_of_service = str(error)
                log.error("out_of_service", detail=str(error))
            await asyncio.sleep(RETRY_INTERVAL_S)  # wait: the engine is out of service, which readiness names
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_INTERVAL_S)  # wait: the main process names Redis
        await asyncio.sleep(POLL_INTERVAL_S)  # wait: pause between two looks


async def _load(streams: StreamClient, engine: VllmEngine, announced: Policy) -> None:
    before = engine.serving
    await _load_recorded(streams, engine, announced)
    if before is not None and not is_newer(announced, before):
        log.warning("older_policy_loaded", announced=describe_policy(announced), before=describe_policy(before))


async def _load_recorded(streams: StreamClient, engine: VllmEngine, announced: Policy) -> None:
    with streams.history.record("load", history.describe_policy(announced)) if streams.history else nullcontext():
        await engine.load_policy(announced, allow_older=True)


async def _acknowledge(streams: StreamClient, engine: VllmEngine, replica: str) -> NoReturn:
    """Tell the trainer at each change what is served, and every `HEARTBEAT_INTERVAL_S` that it still is."""
    acknowledged: Policy | None = None
    heartbeat_at = 0.0
    while True:
        serving = engine.serving
        try:
            if serving is not None and (serving != acknowledged or time.monotonic() >= heartbeat_at):
                await asyncio.to_thread(streams.declare_dtype, engine.dtype)  # a server may have lost it
                await asyncio.to_thread(streams.acknowledge_policy, replica, serving)
                acknowledged, heartbeat_at = serving, time.monotonic() + HEARTBEAT_INTERVAL_S
        except UnavailableError as error:
            log.warning("waiting_for_redis", detail=str(error))
            await asyncio.sleep(RETRY_INTERVAL_S)  # wait: the main process names Redis
        await asyncio.sleep(POLL_INTERVAL_S)  # wait: pause between two looks
