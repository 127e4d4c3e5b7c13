"""Serving a policy without a trainer: publish a folder, wait for the services, run one question."""

from __future__ import annotations

import hashlib
import socket
import time
from pathlib import Path

import grpc
from rich.status import Status

from forage_common.errors import UnavailableError, UserError
from forage_common.local.stack import Stack, not_ready
from forage_common.model_folder import WEIGHTS, check_model_folder
from forage_common.settings import Settings
from forage_common.streams import StreamClient
from forage_common.telemetry import split_address
from forage_common.v1.rollout_pb2 import RunRequest
from forage_common.v1.rollout_pb2_grpc import RolloutStub
from forage_common.v1.trajectory_pb2 import ChatMessage, Policy, Prompt, Purpose, Sampling, Trajectory

_READY_S = 300.0


def publish(settings: Settings, folder: Path) -> Policy:
    """Announce a model folder as the policy to serve, with a fresh epoch."""
    check_model_folder(folder)
    client = StreamClient(settings.redis, settings.run.id)
    client.create()
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}: save the model as one file to serve it")
    policy = Policy(
        version=0,
        uri=str(folder.absolute()),
        digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
        epoch=client.next_epoch(),
        published_unix_ms=int(time.time() * 1000),
    )
    client.publish(policy)
    return policy


def wait_until_ready(stack: Stack, spinner: Status) -> None:
    """Supervise until every service is ready, saying what is missing.

    Raises:
        UnavailableError: not ready within five minutes.
    """
    deadline = time.monotonic() + _READY_S
    while waiting := stack.waiting():
        if time.monotonic() > deadline:
            raise UnavailableError(f"not ready after {_READY_S:.0f} s: {waiting}; see {stack.folder / 'logs'}")
        spinner.update("waiting for " + "; ".join(f"{name} ({detail})" for name, detail in waiting.items()))
        stack.supervisor.tick()
        time.sleep(0.5)


def is_running(settings: Settings) -> bool:
    """Whether a rollout service listens at the settings' address, ready or not."""
    with socket.socket() as probe:
        return probe.connect_ex(split_address(settings.rollout.health_address)) == 0


def wait_for_rollout(settings: Settings, spinner: Status) -> None:
    """Wait until somebody else's rollout service is ready.

    Raises:
        UnavailableError: not ready within five minutes.
    """
    deadline = time.monotonic() + _READY_S
    while waiting := not_ready(f"http://{settings.rollout.health_address}/readyz"):
        if time.monotonic() > deadline:
            raise UnavailableError(f"the rollout service is not ready after {_READY_S:.0f} s: {waiting}")
        spinner.update(f"the rollout service waits for {waiting}")
        time.sleep(0.5)


def ask(settings: Settings, question: str, temperature: float = 0.0) -> Trajectory:
    """One trajectory for one question.

    Raises:
        UnavailableError: the rollout service does not answer.
    """
    from forage_common.world.write import prompt_text

    prompt = Prompt(
        run_id=settings.run.id,
        group_uid=f"ask/{time.time_ns()}",
        data_source=next(iter(settings.reward.routes)),
        messages=[ChatMessage(role="user", content=prompt_text(question))],
        samples=1,
        sampling=Sampling(temperature=temperature),
        purpose=Purpose.PURPOSE_ASK,
    )
    address = settings.rollout.grpc_address
    with grpc.insecure_channel(address) as channel:
        try:
            reply = RolloutStub(channel).Run(RunRequest(prompt=prompt), timeout=settings.rollout.trajectory_timeout_s)
        except grpc.RpcError as error:
            raise UnavailableError(f"the rollout service at {address} gave no answer: {error.details()}") from error
    answered: Trajectory = reply.group.trajectories[0]
    return answered
