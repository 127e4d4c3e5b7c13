"""The rollout service and what it needs as processes of their own environments, and a trainer's end of the streams."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import waiting

from forage_proto.v1.trajectory_pb2 import ChatMessage, GroundTruth, Policy, Prompt, Sampling, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_runtime.text.search_prompt import format_search_prompt
from forage_trajectory.codec import unpack_group

START_S = 1200.0
ADDRESSES = (
    "retriever.http",
    "retriever.grpc",
    "reward.grpc",
    "reward.health",
    "rollout.grpc",
    "rollout.health",
    "rollout.http",
)


class Services:
    """Starts services, each from its own environment, with its log in a file; `end` kills what is left of them."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self._repository = repository
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *overrides: str) -> subprocess.Popen[bytes]:
        python = self._repository / f".venvs/{name}/bin/python"
        command = [str(python if python.exists() else sys.executable), "-m", f"forage_{name}", *overrides]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FORAGE__")} | {"OMP_NUM_THREADS": "1"}
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self._folder, env=environment, stderr=log, stdout=log)
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    member.kill()
            process.wait()


def write_small_corpus(file: Path) -> None:
    """Write passages about invented countries; the capital of Norland is Norcity."""
    rows = [{"id": f"d{i}", "contents": f'"Land {i}"\nThe capital of Land {i} is City {i}.'} for i in range(20)]
    rows.append({"id": "north", "contents": '"Norland"\nThe capital of Norland is Norcity.'})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def get(address: str, path: str) -> tuple[int, str]:
    """Return (status, text); status 0 when no process listens, or when it ends in the middle of its answer."""
    request = urllib.request.Request(f"http://{address}{path}")
    opener = urllib.request.OpenerDirector()  # without the handler that raises on 503: /readyz answers with it
    opener.add_handler(urllib.request.HTTPHandler())
    try:
        with opener.open(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""


def list_waiting(address: str) -> set[str] | None:
    """List the parts that /readyz waits for; None before the process listens."""
    status, text = get(address, "/readyz")
    return set(json.loads(text)["waiting_for"]) if status else None


def wait_until(true: Callable[[], Any]) -> None:
    """Wait as long as a busy machine may need to start everything."""
    waiting.wait_until(true, limit_s=START_S)


def end(process: subprocess.Popen[bytes], family: list[psutil.Process]) -> int:
    """Return the exit code of a process that ends, once nothing of its family is left."""
    wait_until(lambda: process.poll() is not None and not any(map(is_running, family)))
    return process.returncode


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def publish(streams: StreamClient, model: Path, runs: Path, version: int, epoch: int) -> Policy:
    folder = runs / f"e2e/policies/v{version}-e{epoch}"
    shutil.copytree(model, folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    policy = Policy(version=version, epoch=epoch, uri=str(folder), digest=digest)
    streams.publish(policy)
    return policy


def build_prompt(position: int, batch: int, version: int, **fields: Any) -> Prompt:
    question = format_search_prompt("What is the capital of Norland?")
    known: dict[str, Any] = {
        "run_id": "e2e",
        "group_uid": f"world/train/{position}/0",
        "data_source": "world_facts",
        "messages": [ChatMessage(role="user", content=question)],
        "ground_truth": GroundTruth(targets=["Norcity"]),
        "samples": 4,
        "sampling": Sampling(temperature=1.0, seed=1 + 10 * position),
        "batch": batch,
        "position": position,
        "min_policy_version": version,
    }
    return Prompt(**{**known, **fields})


def take(streams: StreamClient, count: int, timeout_s: float = START_S) -> list[TrajectoryGroup]:
    """Claim groups from the stream, also those whose acknowledgement was lost with a killed Redis."""
    groups: list[TrajectoryGroup] = []
    deadline = time.monotonic() + timeout_s
    while len(groups) < count and time.monotonic() < deadline:
        entries = streams.reclaim_groups(streams.trajectories, ())
        entries = entries or streams.claim_groups(streams.trajectories, count, 0.5)
        groups += [unpack_group(entry.message.read_packed()) for entry in entries]
        streams.discard(streams.trajectories, [entry.id for entry in entries])
    return groups
