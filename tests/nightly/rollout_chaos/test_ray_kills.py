"""Ray's own processes are killed -9 under the real service: it ends at once and says why, and the next one serves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from openai_server import serve_openai
from rollout_parts import ADDRESSES, Services, end, get, list_waiting, wait_until
from waiting import WAIT_S

from forage_proto.v1.rollout_pb2 import RunRequest
from forage_proto.v1.rollout_pb2_grpc import RolloutStub
from forage_proto.v1.trajectory_pb2 import ChatMessage, Prompt, Purpose, Sampling, Status
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.settings import RedisSettings

_FOLDER = re.compile(r"^/[^=,:]*/forage-ray-[^/]*$")


@pytest.fixture
def services(repository: Path, tmp_path: Path) -> Iterator[Services]:
    made = Services(repository, tmp_path)
    yield made
    made.end()


def ask(address: str) -> str:
    """The answer of the service to a question."""
    question = Prompt(
        messages=[ChatMessage(role="user", content="Who?")],
        samples=1,
        environment="single_turn",
        purpose=Purpose.PURPOSE_ASK,
        sampling=Sampling(temperature=1.0),
    )
    with grpc.insecure_channel(address) as channel:
        (trajectory,) = RolloutStub(channel).Run(RunRequest(prompt=question), timeout=300).group.trajectories
    assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
    return trajectory.spans[-1].text


def kill_and_watch(service: subprocess.Popen[bytes], process: psutil.Process, health: str) -> tuple[float, list[str]]:
    """Kill a process of the service: seconds until the service has ended, and what it said that it waits for."""
    began, said = time.monotonic(), []
    process.kill()

    def has_ended() -> bool:
        _, text = get(health, "/readyz")
        said.extend([json.loads(text)["waiting_for"].get("ray", "")] if text else [])
        return service.poll() is not None

    wait_until(has_ended)
    return time.monotonic() - began, [word for word in said if word]


def test_the_service_ends_at_once_when_ray_dies_and_the_next_one_serves(
    services: Services,
    free_address: Callable[[], str],
    redis_server: RedisSettings,
    repository: Path,
    tmp_path: Path,
) -> None:
    model = repository / "models/tiny-policy"
    addresses = {f"{name}_address": free_address() for name in ADDRESSES}
    health, rollout = addresses["rollout.health_address"], addresses["rollout.grpc_address"]
    with serve_openai(FileTokenizer(model), ["<answer> me </answer>"]) as server:
        common = [f"{name}={address}" for name, address in addresses.items()]
        common += [f"redis.url={redis_server.url}", "run.id=r", f"run.dir={tmp_path}/runs", f"model.path={model}"]
        common += [f"rollout.engine.endpoint={server.url}"]
        for name, title in (("raylet", "raylet"), ("gcs_server", "GCS")):
            service = services.start("rollout", *common)
            wait_until(lambda: "engine" not in (list_waiting(health) or {"engine"}))
            assert "me" in ask(rollout)
            family = psutil.Process(service.pid).children(recursive=True)
            (victim,) = (process for process in family if process.name() == name)
            folder = next(Path(path) for p in family for path in p.cmdline() if _FOLDER.search(path))
            seconds, said = kill_and_watch(service, victim, health)
            sys.stdout.write(f"{name} killed: the service ended after {seconds:.1f} s\n")
            cause = f"Ray's {title} (process {victim.pid}) has ended"
            assert set(said) <= {cause}
            last = json.loads((tmp_path / "rollout.log").read_text().splitlines()[-1])
            assert (last["event"], last["level"], last["detail"]) == ("ray_failed", "error", cause)
            assert end(service, family) == 1
            wait_until(lambda gone=folder: not gone.exists())
        service = services.start("rollout", *common)
        wait_until(lambda: "engine" not in (list_waiting(health) or {"engine"}))
        assert "me" in ask(rollout)
        service.send_signal(signal.SIGTERM)
        assert service.wait(WAIT_S) == 0
