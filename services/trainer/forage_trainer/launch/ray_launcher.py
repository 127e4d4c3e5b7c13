"""The trainer's processes as actors of an existing Ray cluster, or of one that this process starts.

This process does not train: it places the ranks, forwards their logs and a SIGTERM to them, and ends all of them when
one fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from forage_runtime.addresses import split_address
from forage_runtime.devices import resolve_device
from forage_runtime.errors import CollectiveTimeoutError, UserError
from forage_runtime.files.socket_folder import find_socket_folder
from forage_runtime.ray_environment import FOLDER_PREFIX, LONGEST_SOCKET, extend_start_limit, ray_environment
from forage_runtime.settings import Settings, TrainerSettings
from forage_runtime.stop import Stop, Stopped
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_trainer.device import check_gpus
from forage_trainer.run import EXIT_FAILED, EXIT_STOPPED

if TYPE_CHECKING:
    from forage_trainer.launch.ray_rank import RankLocation

log = get_logger()
POLL_INTERVAL_S = 0.5
_CONNECT_TIMEOUT_S = 10.0
_FAILURE_GRACE_S = 5.0
"""Wait for the failures of other ranks: the first one reported is often not the cause."""
_LOG_FLUSH_S = 1.0
_START_ATTEMPTS = 3
_OBJECT_STORE_BYTES = 80 * 2**20


def launch(settings: Settings) -> int:
    """Train on Ray; the exit code of rank 0, or 1 where another one failed.

    Raises:
        UserError: the cluster cannot be joined, has no room or no shared folder, or rank 0 raised it.
    """
    stop = Stop()
    with _connect(settings.trainer):
        stop.install_handler()  # Ray has installed its own handler
        try:
            ranks = Ranks(settings, stop)
            try:
                ranks.prepare()
                return ranks.train()
            finally:
                time.sleep(_LOG_FLUSH_S)  # wait: one second
                ranks.kill()
        except Stopped:
            log.info("stopped")
            return EXIT_STOPPED


class Ranks:
    """verl's worker group of all ranks."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        """Start the actors, once the cluster has room for them.

        Raises:
            UserError: the cluster has no room, or this machine no GPUs for a torch that was built for them.
            Stopped: the process was asked to stop meanwhile.
        """
        import ray

        # Not by what the cluster has now: its GPU nodes may come later.
        gpus = resolve_device(settings.trainer.device, "trainer.device")
        if gpus and not settings.trainer.ray.address:
            check_gpus(int(ray.cluster_resources().get("GPU", 0)), settings.trainer.n_gpus_per_node)
        if gpus:
            os.environ["VERL_PLATFORM"] = "nvidia"
        else:
            import forage_trainer.engine.verl_cpu  # noqa: F401  (makes it verl's platform)
        from forage_trainer.launch.ray_group import start_worker_group

        self._stop = stop
        self._limit_s = max(settings.trainer.ray.wait_s, settings.trainer.collective_timeout_s)
        self._group = start_worker_group(settings, gpus, stop.check)
        self._locations: list[RankLocation] = self._wait_for(self._group.locate())
        for rank in self._locations:
            log.info("rank_placed", rank=rank.rank, node=rank.node, host=rank.host, pid=rank.pid, gpu=rank.gpu)

    def prepare(self) -> None:
        """Check that every node has the model, and that all share the run's folder.

        Raises:
            UserError: a node lacks one; the message is of its rank.
            Stopped: the process was asked to stop meanwhile.
        """
        self._wait_for(self._group.check_node())
        mark = f".shared-{secrets.token_hex(8)}"
        try:
            self._wait_for([self._group.write_mark(mark)])
            self._wait_for(self._group.check_mark(mark))
        finally:
            self._group.remove_mark(mark)

    def train(self) -> int:
        """Wait until all ranks have ended or one has failed; returns the exit code.

        Raises:
            UserError: rank 0 raised it.
        """
        import ray

        running = dict(zip(self._group.train(), self._locations, strict=True))
        failed: dict[int, Exception] = {}
        codes: dict[int, int] = {}
        stop_sent, deadline = False, float("inf")
        while running and time.monotonic() < deadline:
            for ended in ray.wait(list(running), timeout=POLL_INTERVAL_S)[0]:  # wait: each rank ends by itself
                rank = running.pop(ended).rank
                try:
                    codes[rank] = ray.get(ended)
                except Exception as error:  # noqa: BLE001 - every cause of a rank's death is reported below
                    failed[rank] = error
            if failed or 0 in codes:
                deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_S)
            if not stop_sent and self._stop.is_requested:
                stop_sent = True
                self._group.stop()
        return codes[0] if 0 in codes else self._report_failure(failed)

    def kill(self) -> None:
        """Kill the ranks that still run."""
        import ray

        for worker in self._group.workers:
            ray.kill(worker)

    def _report_failure(self, failed: Mapping[int, Exception]) -> int:
        rank = find_cause(failed)
        error = failed[rank]
        original = _unwrap(error)
        if isinstance(original, UserError):
            raise original
        reason = " ".join(str(error).split()) if original is error else f"{type(original).__name__}: {original}"
        log.error(
            "rank_failed",
            reason=f"{self._locations[rank]}: {reason}; the next start resumes",
            also=sorted(failed.keys() - {rank}),
            exception=None if original is error else str(error),
        )
        return EXIT_FAILED

    def _wait_for(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for calls of ranks and return their results.

        Raises:
            CollectiveTimeoutError: a rank gave no answer.
            UserError: a call raised it, or a rank could not start.
            Stopped: the process was asked to stop meanwhile.
        """
        import ray

        open_calls, deadline = list(calls), time.monotonic() + self._limit_s
        with waiting("answers of ranks", on="ray", limit_s=self._limit_s):
            while open_calls:
                self._stop.check()
                done, open_calls = ray.wait(open_calls, timeout=POLL_INTERVAL_S)
                try:
                    ray.get(done)
                except Exception as error:
                    if isinstance(_unwrap(error), UserError):
                        raise _unwrap(error) from None
                    raise
                if open_calls and time.monotonic() > deadline:
                    raise CollectiveTimeoutError(
                        f"{len(open_calls)} of {len(calls)} ranks gave no answer within {self._limit_s:g} s"
                    )
        results: list[Any] = ray.get(list(calls))
        return results


def find_cause(failed: Mapping[int, Exception]) -> int:
    """Find the rank whose failure caused those of the others at about the same time.

    A rank that died comes before one that raised an error; an error for the user before one about lost peers.
    """
    from ray.exceptions import RayActorError

    def order(rank: int) -> tuple[bool, bool, int]:
        error = failed[rank]
        return not isinstance(error, RayActorError), not isinstance(_unwrap(error), UserError), rank

    return min(failed, key=order)


def _unwrap(error: Exception) -> Exception:
    """Return the error that an actor raised, which Ray wraps in one of its own."""
    cause: Exception | None = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


@contextmanager
def _connect(trainer: TrainerSettings) -> Iterator[None]:
    """Connect to the cluster at `trainer.ray.address`, or to a Ray of our own that ends with the block."""
    os.environ.update({"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    parent = None if trainer.ray.address else find_socket_folder(LONGEST_SOCKET)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        if trainer.ray.address:
            _join_cluster(trainer.ray.address)
        else:
            _start_ray(trainer.n_gpus_per_node, folder)
        import ray

        try:
            _forward_logs()
            yield
        finally:
            ray.shutdown()


def _join_cluster(address: str) -> None:
    import ray

    try:
        if address != "auto":
            # Ray's client ends the process where nothing listens at the address.
            socket.create_connection(split_address(address), _CONNECT_TIMEOUT_S).close()
        ray.init(address=address, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(
            f"trainer.ray.address {address} cannot be joined ({' '.join(str(error).split())}): start the trainer on a "
            "node of a running Ray cluster, with the cluster's token where it has one"
        ) from None


def _start_ray(processes: int, folder: str) -> None:
    """Start a Ray on this machine.

    Args:
        folder: for Ray's sockets, short enough for `LONGEST_SOCKET`.
    """
    os.environ.update(ray_environment())
    import ray

    options = {"address": "local", "num_cpus": processes, "object_store_memory": _OBJECT_STORE_BYTES}
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            with extend_start_limit(Path(folder)):
                ray.init(**options, include_dashboard=False, configure_logging=False, _temp_dir=folder)
            return
        except Exception as error:
            # A very busy machine exceeds Ray's time limits; Ray raises bare Exceptions then.
            log.warning("ray_did_not_start", attempt=attempt, detail=str(error))
            if attempt == _START_ATTEMPTS:
                raise
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _forward_logs() -> None:
    """Write the ranks' output to stderr unchanged: Ray's own handler would put a prefix before JSON."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def write(message: Mapping[str, Any]) -> None:
        if message.get("actor_name"):  # without a name it is output of Ray's own processes
            sys.stderr.write("".join(f"{line}\n" for line in message["lines"]))
            sys.stderr.flush()

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("forage", write)
