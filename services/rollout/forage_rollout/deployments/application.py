"""The whole service as one Ray Serve application: three deployments, their replicas and their limits."""

from __future__ import annotations

import math
from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from forage_queue.rollout.concurrency import count_most_groups
from forage_rollout.deployments.autoscaling import (
    DOWNSCALE_DELAY_S,
    MOST_GROUPS,
    MOST_REQUESTS,
    UPSCALE_DELAY_S,
    count_wanted,
    find_target,
)
from forage_rollout.deployments.devices import check_nodes, count_gpus, list_node_gpus
from forage_rollout.deployments.dispatcher import AgentDeployment, DispatcherDeployment
from forage_rollout.deployments.engine import EngineDeployment
from forage_rollout.deployments.routing import AgentRouter, EngineRouter
from forage_runtime.settings import ReplicaSettings, Settings, load_settings

_MAX_ONGOING_REQUESTS = 4096  # the dispatcher bounds what is in flight, Serve need not
_CPUS = 0.1  # of Ray's accounting only: replicas share what the machine has
_HEALTH_PERIOD_S = 0.1  # until the next check begins: see `CheckPace`
_ROUTING_PERIOD_S = 1.0
_DRAIN_MARGIN_S = 10.0  # for writing the last groups
_HANG_MARGIN_S = 30.0  # a probe waits for `engine.hang_timeout_s` and reports what is wrong; Serve must not be faster


def build_application(settings: Settings, engine_class: type = EngineDeployment) -> Application:
    """The service as one Serve application whose ingress is the dispatcher.

    Raises:
        UserError: the installed vLLM cannot compute on `rollout.device`.
    """
    text, rollout = settings.model_dump_json(), settings.rollout
    gpus = count_gpus(rollout)
    engine = build_engine_deployment(engine_class, settings, rollout.engine_replicas, gpus).bind(text)
    # A replica is not ended while a group runs on it.
    agent = _build_deployment(
        "Agent",
        AgentDeployment,
        ReplicaSettings(max=rollout.max_agents),
        graceful_shutdown_timeout_s=rollout.longest_group_s,
        request_router_config=RequestRouterConfig(request_router_class=AgentRouter),
    ).bind(text, engine)
    return cast(Application, build_dispatcher_deployment(DispatcherDeployment, settings).bind(text, agent, engine))


def build_dispatcher_deployment(of: type, settings: Settings) -> Any:
    """Dispatcher replicas, as many as their groups in flight need, not bound yet."""
    rollout = settings.rollout
    return _build_deployment(
        "Dispatcher",
        of,
        ReplicaSettings(max=rollout.max_dispatchers),
        count_most_groups(rollout),
        ongoing=MOST_GROUPS,
        policy=AutoscalingPolicy(policy_function=count_wanted),
        graceful_shutdown_timeout_s=rollout.longest_group_s + _DRAIN_MARGIN_S,
    )


def build_engine_deployment(of: type, settings: Settings, replicas: ReplicaSettings, gpus: int) -> Any:
    """Engine replicas with the router and the limits that they need, not bound yet.

    Args:
        gpus: how many a replica has, all on one node.
    """
    rollout = settings.rollout
    return _build_deployment(
        "Engine",
        of,
        replicas,
        rollout.engine.max_num_seqs,  # a longer queue holds new groups back
        policy=AutoscalingPolicy(policy_function=count_wanted),
        gpus=gpus,
        graceful_shutdown_timeout_s=rollout.trajectory_timeout_s,
        health_check_timeout_s=rollout.engine.hang_timeout_s + _HANG_MARGIN_S,
        request_router_config=RequestRouterConfig(
            request_router_class=EngineRouter, request_routing_stats_period_s=_ROUTING_PERIOD_S
        ),
    )


def build(arguments: dict[str, str]) -> Application:
    """The application for `serve deploy` and KubeRay's RayService, which run it inside the cluster.

    Args:
        arguments: settings by their dotted names, such as `{"run.id": "one", "redis.url": "redis://…"}`.

    Raises:
        UserError: a setting is unknown or wrong, or asks for what vLLM or no node of the cluster can give.
    """
    settings = load_settings(overrides=[f"{name}={value}" for name, value in arguments.items()])
    check_nodes(settings.rollout, list_node_gpus())
    return build_application(settings)


def count_cpus(settings: Settings) -> float:
    """CPUs that the application asks of Ray's accounting with all its replicas."""
    rollout = settings.rollout
    return _CPUS * (rollout.engine_replicas.max + rollout.max_agents + rollout.max_dispatchers)


def _build_deployment(
    name: str,
    of: type,
    replicas: ReplicaSettings,
    most: float = math.inf,
    ongoing: float = MOST_REQUESTS,
    policy: AutoscalingPolicy | None = None,
    gpus: int = 0,
    **options: Any,
) -> Any:
    if replicas.max > replicas.min:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            target_ongoing_requests=find_target(ongoing, most),
            upscale_delay_s=UPSCALE_DELAY_S,
            downscale_delay_s=DOWNSCALE_DELAY_S,
            policy=policy or AutoscalingPolicy(),
        )
    else:
        options["num_replicas"] = replicas.min
    return serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": _CPUS, "num_gpus": gpus},
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_HEALTH_PERIOD_S,
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **options,
    )(of)
