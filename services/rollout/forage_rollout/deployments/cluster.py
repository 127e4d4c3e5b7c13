"""The Ray that the deployments run in: a small one on loopback that ends with this process, or a shared cluster."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any

import psutil

from forage_rollout.deployments import reaper
from forage_rollout.deployments.devices import (
    check_machine,
    check_nodes,
    count_gpus,
    describe_shortage,
    list_node_gpus,
)
from forage_rollout.deployments.relay import LogRelay
from forage_rollout.vllm_start.start_errors import read_failure
from forage_rollout.vllm_start.vllm_args import build_environment
from forage_runtime.devices import count_cpus as count_machine_cpus
from forage_runtime.errors import StartError
from forage_runtime.files.socket_folder import find_socket_folder
from forage_runtime.ray_environment import FOLDER_PREFIX, LONGEST_SOCKET, extend_start_limit, ray_environment
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting

log = get_logger()
_MAX_STARTS = 3
_STOP_TIMEOUT_S = 5.0
_ABANDON_TIMEOUT_S = 2.0
LOST_AFTER_S = 30.0
"""A joined cluster that does not answer for so long counts as gone."""
_VITAL_PROCESSES = {"raylet": "raylet", "gcs_server": "GCS"}
_DRAIN_REPLY_S = 3.0
_POLL_INTERVAL_S = 1.0
_OBJECT_STORE_BYTES = 80 * 2**20
# Read by Serve when a replica imports it. With one event loop a call does not cross threads, which costs latency; a
# message must hold a context of a million tokens.
_SERVE_ENVIRONMENT = {
    "RAY_SERVE_LOG_TO_STDERR": "1",  # else Serve keeps the replicas' stderr in files of its own
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 2**20),
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
# For a Ray of our own, besides what `ray_environment` sets for every service.
_RAY_ENVIRONMENT = {
    # Without it vLLM's engine core would outlive its replica when that is killed.
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "AUTOSCALER_UPDATE_INTERVAL_S": "60",
}


def lock_folder(folder: Path) -> IO[str]:
    """Lock the folder until this process ends or the returned file is closed.

    Raises:
        BlockingIOError: a running process holds the lock.
    """
    file = (folder / "lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of services that were killed together with their reapers."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        if not (folder / "lock").exists():
            continue  # being created right now
        try:
            lock_folder(folder).close()
        except OSError:
            continue  # in use, or belongs to another user
        shutil.rmtree(folder, ignore_errors=True)


def open_cluster(settings: Settings) -> Cluster:
    """The cluster that the settings ask for; not started yet."""
    if settings.rollout.use_existing_app:
        return ExistingApplication(settings)
    return JoinedCluster(settings) if settings.rollout.ray_address else LocalCluster(settings)


def get_application_name(settings: Settings) -> str:
    """The name of one run's application among those that share a Ray cluster."""
    return f"forage-rollout-{settings.run.id}"


def limit_to_machine(settings: Settings, cpus: int) -> Settings:
    """Settings with at most as many agents and dispatchers as a machine has CPUs: more of them would share one."""
    rollout = settings.rollout
    changes = {
        "max_agents": max(1, min(rollout.max_agents, cpus)),
        "max_dispatchers": max(1, min(rollout.max_dispatchers, cpus)),
    }
    return settings.model_copy(update={"rollout": rollout.model_copy(update=changes)})


def find_vital_processes() -> dict[str, psutil.Process]:
    """The children of this process without which its Ray cannot work, by their names in messages."""
    children = {child.name(): child for child in psutil.Process().children()}
    return {title: children[name] for name, title in _VITAL_PROCESSES.items()}


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Cluster(ABC):
    """One run's Serve application in the Ray that this process is connected to."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @abstractmethod
    def start(self) -> None:
        """Block until all deployments run, which takes most of a minute on CPU.

        Raises:
            Exception: there is no Ray, or Serve gave up on a deployment.
        """

    @abstractmethod
    def stop(self, timeout_s: float) -> None:
        """End what was started, by force where it does not end by itself within the time."""

    @abstractmethod
    def find_failure(self) -> str:
        """Why this process must end: a part of Ray without which nothing works again; empty while there is none.

        May block for as long as Ray does not answer.
        """

    @abstractmethod
    def abandon(self) -> None:
        """End what was started after `find_failure` found something, without Ray's help, within two seconds or so."""

    def deploy(self) -> None:
        from ray import serve

        from forage_rollout.deployments.application import build_application

        begin = time.perf_counter()
        name = get_application_name(self._settings)
        # Ray adds nodes only for what has been asked for.
        target = serve.RunTarget(target=build_application(self._settings), name=name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)
        self._wait_for_application(name, "Ray and Serve give up by themselves", is_ours=True)
        log.info("deployments_running", seconds=round(time.perf_counter() - begin, 1))

    def _wait_for_application(self, name: str, why_unlimited: str, is_ours: bool) -> None:
        """Wait until it runs; GPUs that the cluster lacks are shown, and said once in the log.

        Raises:
            StartError: an engine of ours does not start, and would not at another try.
            RuntimeError: Serve gave up on it, and it is ours: nobody else deploys it again.
        """
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        with waiting(f"the application {name}", on="ray", limit_s=None, why_unlimited=why_unlimited) as wait:
            while True:
                found = serve.status().applications.get(name)
                if found is not None and found.status == ApplicationStatus.RUNNING:
                    return
                deployments = {} if found is None else found.deployments
                failures = {one: read_failure(status.message) for one, status in deployments.items() if status.message}
                described = "; ".join(f"{reason} (the {one} does not start)" for one, (reason, _) in failures.items())
                if is_ours and any(lasts for _, lasts in failures.values()):
                    raise StartError(described)
                if is_ours and found is not None and found.status == ApplicationStatus.DEPLOY_FAILED:
                    raise RuntimeError(described or f"the application {name} does not start: {found.message}")
                shortage = describe_shortage(self._settings.rollout, list_node_gpus())
                if shortage and not wait.detail:
                    log.warning("waiting_for_gpus", detail=shortage, remedy="add GPU nodes, or an autoscaler that does")
                wait.detail = described or shortage
                time.sleep(_POLL_INTERVAL_S)

    def get_handle(self, deployment: str) -> Any:
        """Serve's handle of a running deployment."""
        from ray import serve

        return serve.get_deployment_handle(deployment, get_application_name(self._settings))

    async def broadcast(self, deployment: str, method: str, *arguments: Any) -> list[Any]:
        """See `replica.broadcast`."""
        from forage_rollout.deployments.replica import broadcast

        return await broadcast(self.get_handle(deployment), method, *arguments)

    def begin_drain(self) -> None:
        """Claim no more prompts; block until running groups have ended, for `rollout.drain_timeout_s` at most."""
        seconds = self._settings.rollout.drain_timeout_s
        try:
            draining = self.get_handle("Dispatcher").broadcast("drain", seconds)
            left = sum(draining.results(timeout_s=seconds + _DRAIN_REPLY_S))
            if self._settings.tracing.enabled:
                self.get_handle("Agent").broadcast("stop_tracing").results(timeout_s=_DRAIN_REPLY_S)
        except Exception as error:  # noqa: BLE001 - the service must end; unfinished prompts stay pending and are reclaimed
            log.warning("not_drained", detail=f"{type(error).__name__}: {error}")
        else:
            log.info("drained", groups_left=left)


class JoinedCluster(Cluster):
    """A Ray cluster that others run and share; only this run's application in it is ours to end."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._alive_at: float | None = None  # when this node was last seen in the cluster; None before it joined

    def start(self) -> None:
        from ray import serve

        count_gpus(self._settings.rollout)  # whether the installed vLLM can do what is asked, before anything starts
        self._join()
        check_nodes(self._settings.rollout, list_node_gpus())
        serve.start(http_options={"location": "NoServer"})
        self.deploy()

    def _join(self) -> None:
        import ray

        ray.init(
            address=self._settings.rollout.ray_address,
            namespace=f"forage-{self._settings.run.id}",
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": {**_SERVE_ENVIRONMENT, **build_environment(self._settings.rollout.engine)}},
        )
        self._alive_at = time.monotonic()
        log.info("ray_joined", address=self._settings.rollout.ray_address)

    def find_failure(self) -> str:
        import ray

        if self._alive_at is None:
            return ""
        detail = "the cluster no longer has this node"
        try:
            own = ray.get_runtime_context().get_node_id()
            is_alive = any(node["Alive"] and node["NodeID"] == own for node in ray.nodes())
        except Exception as error:  # noqa: BLE001 - Ray raises what it likes when its server is gone
            is_alive, detail = False, f"{type(error).__name__}: {error}"
        now = time.monotonic()
        if is_alive:
            self._alive_at = now
        lost_s = now - self._alive_at
        if lost_s < LOST_AFTER_S:
            return ""  # a head that is started again is away for a moment, and its cluster goes on
        return f"no Ray at {self._settings.rollout.ray_address} for {lost_s:.0f} s ({detail})"

    def abandon(self) -> None:
        """The cluster is not ours: whoever runs it starts it again."""

    def stop(self, timeout_s: float) -> None:
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        serve.delete(get_application_name(self._settings), _blocking=False)
        deadline = time.monotonic() + timeout_s
        while get_application_name(self._settings) in serve.status().applications and time.monotonic() < deadline:
            time.sleep(0.2)  # wait: has a time limit, while the service stops
        ray.shutdown()


class ExistingApplication(JoinedCluster):
    """A cluster in which others run this application, as KubeRay's RayService does: nothing in it is ours to end."""

    def start(self) -> None:
        self._join()
        name = get_application_name(self._settings)
        self._wait_for_application(name, "others start it", is_ours=False)
        log.info("attached", application=name)

    def begin_drain(self) -> None:
        """The application keeps answering prompts: only calls through this process end."""

    def stop(self, timeout_s: float) -> None:
        import ray

        ray.shutdown()


class LocalCluster(Cluster):
    """A Ray on loopback that this process starts, and whose processes it ends."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(limit_to_machine(settings, count_machine_cpus()))
        self._stopping = False
        self._vital: dict[str, psutil.Process] = {}  # name in messages → process
        parent = find_socket_folder(LONGEST_SOCKET)
        remove_abandoned(parent)
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
        self._lock = lock_folder(self._folder)
        self._relay = LogRelay(self._folder)
        command = [sys.executable, "-I", "-S", reaper.__file__, str(self._folder)]
        self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def start(self) -> None:
        os.environ.update({**ray_environment(), **_RAY_ENVIRONMENT, **build_environment(self._settings.rollout.engine)})
        import ray
        from ray import serve

        os.environ.update(_SERVE_ENVIRONMENT)  # after the import: not for this process, which blocks on handles

        from forage_rollout.deployments.application import count_cpus

        begin = time.perf_counter()
        for attempt in range(1, _MAX_STARTS + 1):
            try:
                with extend_start_limit(self._folder):
                    ray.init(
                        num_cpus=max(1, math.ceil(count_cpus(self._settings))),
                        object_store_memory=_OBJECT_STORE_BYTES,
                        include_dashboard=False,
                        log_to_driver=False,
                        configure_logging=False,
                        _temp_dir=str(self._folder),
                    )
                serve.start(http_options={"location": "NoServer"})
                break
            except Exception as error:
                # Ray's time limits expire on a very busy machine, and it raises bare Exceptions then.
                log.warning("ray_did_not_start", attempt=attempt, detail=str(error))
                if attempt == _MAX_STARTS or self._stopping:
                    raise
                self._end_processes(_STOP_TIMEOUT_S)
        check_machine(self._settings.rollout, sum(list_node_gpus()))
        self._vital = find_vital_processes()
        log.info("ray_started", seconds=round(time.perf_counter() - begin, 1))
        self.deploy()

    def find_failure(self) -> str:
        """A raylet or a GCS that has ended: Ray starts neither again, and calls would wait for them for minutes."""
        if self._stopping:
            return ""
        return "; ".join(
            f"Ray's {title} (process {process.pid}) has ended"
            for title, process in self._vital.items()
            if not _is_running(process)
        )

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._end_processes(timeout_s)
        self._reaper.communicate()

    def abandon(self) -> None:
        self._stopping = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.communicate(timeout=_ABANDON_TIMEOUT_S)  # the end of its stdin tells it to end everything

    def _end_processes(self, timeout_s: float) -> None:
        family = [p for p in psutil.Process().children(recursive=True) if p.pid != self._reaper.pid]
        try:
            import ray

            ray.shutdown()
        finally:
            _, alive = psutil.wait_procs(family, timeout=timeout_s)
            for process in alive:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
