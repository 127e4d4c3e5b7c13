"""The services that answer: started here and switched from policy to policy, or somebody else's, used as they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.policies import EvaluatedPolicy, Kind
from forage_cli.local import serving
from forage_cli.local.stack import SERVING, Program, list_waiting
from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import UnavailableError, UserError
from forage_runtime.settings import Settings
from forage_runtime.settings.reward import make_route

_SWITCH_S = 300.0
_POLL_S = 0.2


def check_policies(policies: Sequence[EvaluatedPolicy], settings: Settings) -> None:
    """Check that running services, or those that will be started, can serve these policies.

    Raises:
        UserError: services of somebody else are running, or none run and `running` is asked for.
    """
    running = serving.is_running(settings, Program.ROLLOUT)
    uses_running = [policy for policy in policies if policy.kind is Kind.RUNNING]
    if running and len(uses_running) < len(policies):
        other = next(policy for policy in policies if policy.kind is not Kind.RUNNING)
        raise UserError(
            f"services are already running at {settings.rollout.grpc_address}, and are not switched to "
            f"{other.source}: evaluate what they serve with --policy running, start others with --base-port, "
            "or end them"
        )
    if uses_running and not running:
        raise UserError(
            f"no services are running at {settings.rollout.grpc_address}: start them with 'forage up', "
            "or name a policy with --policy"
        )


def prepare_settings(settings: Settings, methods: Sequence[Method], sources: Sequence[str]) -> Settings:
    """Return the settings of services that are started for an evaluation.

    A data source without a reward is scored by `em`: the metric is exact match, whatever was trained on. The prompt of
    one-shot RAG holds passages, so a first prompt may be as long as a turn's context.
    """
    routes = {source: make_route("em") for source in sources} | settings.reward.routes
    rollout = settings.rollout
    if Method.RAG in methods:
        longest = max(rollout.max_start_length, rollout.max_prompt_length)
        rollout = rollout.model_copy(update={"max_start_length": longest})
    reward = settings.reward.model_copy(update={"routes": routes})
    return settings.model_copy(update={"reward": reward, "rollout": rollout})


@contextmanager
def start_engine(policies: Sequence[EvaluatedPolicy], settings: Settings, console: Console) -> Iterator[Settings]:
    """Ensure services for policies that one engine can serve, until the block ends; raises as `ensure_services`."""
    first = policies[0]
    if first.kind is not Kind.RUNNING:
        remote = settings.rollout.engine.model_copy(update={"endpoint": first.url})
        rollout = settings.rollout.model_copy(update={"engine": remote})
        folders = [str(policy.folder.absolute()) for policy in policies if policy.folder is not None]
        allowed = (*settings.security.allowed_addresses, *folders)
        security = settings.security.model_copy(update={"allowed_addresses": allowed})
        settings = settings.model_copy(update={"rollout": rollout, "security": security})
    model = None if first.kind is Kind.RUNNING else first.folder
    with serving.ensure_services(settings, console, SERVING, model, activity="evaluating") as settings:
        yield settings


async def switch_policy(policy: EvaluatedPolicy, settings: Settings, rollout: RolloutClient) -> None:
    """Publish the policy, and return when the services serve it.

    Raises:
        UnavailableError: it is not served within five minutes.
    """
    if policy.kind is not Kind.FOLDER or policy.folder is None:
        return
    served = (await rollout.status()).serving
    if served.uri == str(policy.folder.absolute()):
        return
    wanted = await asyncio.to_thread(serving.publish, settings, policy.folder)
    deadline = time.monotonic() + _SWITCH_S
    while (served.epoch, served.version) != (wanted.epoch, wanted.version):
        if time.monotonic() > deadline:
            waiting = (await asyncio.to_thread(list_waiting, settings, [Program.ROLLOUT])).get(Program.ROLLOUT)
            log = settings.run.folder / "logs" / "rollout.log"
            raise UnavailableError(
                f"{policy.source} is not served after {_SWITCH_S:.0f} s ({waiting or 'no reason given'}): see {log}"
            )
        await asyncio.sleep(_POLL_S)  # wait: has a time limit, shown to the user
        served = (await rollout.status()).serving


async def identify_running(policy: EvaluatedPolicy, settings: Settings) -> EvaluatedPolicy:
    """Complete the policy `running` with the digest of the served weights, and their folder if it is local."""
    async with RolloutClient(settings) as rollout:
        served: Policy = (await rollout.status()).serving
    weights = served.digest or "+".join(file.digest for file in served.files)
    folder = Path(served.uri)
    known = folder if served.uri and (folder / "tokenizer.json").is_file() else None
    return replace(policy, digest=f"{weights or 'unpublished'}@{served.version}", folder=known)
