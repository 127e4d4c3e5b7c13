"""The trainer's processes as actors of a Ray cluster that is there, or of a Ray of our own on this machine.

This process trains nothing: it places the ranks, passes on their logs and a SIGTERM, and ends them all with the first
that fails.
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
from typing import TYPE_CHECKING, Any

import psutil

from forage_common.addresses import split_address
from forage_common.errors import UserError
from forage_common.ray_environment import ray_environment
from forage_common.settings import Settings, TrainerSettings
from forage_common.telemetry.logs import get_logger
from forage_trainer.run import EXIT_FAILED, EXIT_STOPPED
from forage_trainer.waiting import Stop, Stopped

if TYPE_CHECKING:
    from forage_trainer.launch.ray_rank import Place

log = get_logger()
_LOOK_S = 0.5
_ANSWER_S = 10.0
_LAST_WORDS_S = 5.0
"""For other ranks to say why they failed, too: the first to be heard is often not the cause."""
_LAST_LINES_S = 1.0
_STARTS = 3
_OBJECT_STORE_BYTES = 80 * 2**20


def launch(settings: Settings) -> int:
    """Train on Ray; the exit code of rank 0, or 1 where another one failed.

    Raises:
        UserError: the cluster cannot be joined, has no room or no shared folder, or rank 0 raised it.
    """
    stop = Stop()
    with _joined(settings.trainer):
        stop.on_signals()  # Ray had set a handler of its own
        try:
            ranks = Ranks(settings, stop)
            try:
                ranks.enter()
                return ranks.train()
            finally:
                time.sleep(_LAST_LINES_S)
                ranks.end()
        except Stopped:
            log.info("stopped")
            return EXIT_STOPPED


class Ranks:
    """verl's worker group of all ranks, and how it ends."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        """Start the actors, once there is room for them.

        Raises:
            UserError: there is none.
            Stopped: meanwhile.
        """
        import ray

        gpus = ray.cluster_resources().get("GPU", 0) > 0
        if gpus:
            os.environ["VERL_PLATFORM"] = "nvidia"
        else:
            import forage_trainer.engine.verl_cpu  # noqa: F401  (makes it verl's platform)
        from forage_trainer.launch.ray_group import worker_group

        self._stop = stop
        self._group = worker_group(settings, gpus, stop.check)
        self._places: list[Place] = self._results(self._group.place())
        for place in self._places:
            log.info("rank_placed", rank=place.rank, node=place.node, host=place.host, pid=place.pid, gpu=place.gpu)

    def enter(self) -> None:
        """See that every node has what it needs.

        Raises:
            UserError: one has not; in its own words.
            Stopped: meanwhile.
        """
        self._results(self._group.enter())
        mark = f".shared-{secrets.token_hex(8)}"
        try:
            self._results([self._group.put_mark(mark)])
            self._results(self._group.find_mark(mark))
        finally:
            self._group.remove_mark(mark)

    def train(self) -> int:
        """Until all have ended, or one has failed: the exit code.

        Raises:
            UserError: rank 0's.
        """
        import ray

        running = dict(zip(self._group.train(), self._places, strict=True))
        failed: dict[int, Exception] = {}
        codes: dict[int, int] = {}
        asked, deadline = False, float("inf")
        while running and time.monotonic() < deadline:
            for ended in ray.wait(list(running), timeout=_LOOK_S)[0]:
                rank = running.pop(ended).rank
                try:
                    codes[rank] = ray.get(ended)
                except Exception as error:  # noqa: BLE001 - whatever a rank dies of is said below
                    failed[rank] = error
            if failed or 0 in codes:
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
            if not asked and self._stop.is_requested:
                asked = True
                self._group.stop()
        return codes[0] if 0 in codes else self._fail(failed)

    def end(self) -> None:
        """Kill those that still run."""
        import ray

        for worker in self._group.workers:
            ray.kill(worker)

    def _fail(self, failed: Mapping[int, Exception]) -> int:
        rank = cause(failed)
        error = failed[rank]
        original = _original(error)
        if isinstance(original, UserError):
            raise original
        what = " ".join(str(error).split()) if original is error else f"{type(original).__name__}: {original}"
        log.error(
            "rank_failed",
            reason=f"{self._places[rank]}: {what}; the next start resumes",
            also=sorted(failed.keys() - {rank}),
            exception=None if original is error else str(error),
        )
        return EXIT_FAILED

    def _results(self, calls: Sequence[Any]) -> list[Any]:
        """What calls of all ranks return.

        Raises:
            UserError: one of them has raised it, or a rank could not start.
            Stopped: meanwhile.
        """
        import ray

        waiting = list(calls)
        while waiting:
            self._stop.check()
            done, waiting = ray.wait(waiting, timeout=_LOOK_S)
            try:
                ray.get(done)
            except Exception as error:
                if isinstance(_original(error), UserError):
                    raise _original(error) from None
                raise
        found: list[Any] = ray.get(list(calls))
        return found


def cause(failed: Mapping[int, Exception]) -> int:
    """Of ranks that failed at about the same time, the one that the others failed of: one that died before those with
    an error, one whose error is a sentence for the user before one whose peers are gone."""
    from ray.exceptions import RayActorError

    def order(rank: int) -> tuple[bool, bool, int]:
        error = failed[rank]
        return not isinstance(error, RayActorError), not isinstance(_original(error), UserError), rank

    return min(failed, key=order)


def _original(error: Exception) -> Exception:
    """What was raised in an actor, of what Ray has made of it."""
    found: Exception | None = getattr(error, "cause", None)
    return found if isinstance(found, Exception) else error


@contextmanager
def _joined(trainer: TrainerSettings) -> Iterator[None]:
    """Connected to the cluster at `trainer.ray.address`, or to a Ray of our own that is gone afterwards."""
    os.environ.update({"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1", "RAY_USAGE_STATS_ENABLED": "0"})
    with tempfile.TemporaryDirectory(prefix="forage-ray-", ignore_cleanup_errors=True) as folder:
        if trainer.ray.address:
            _join(trainer.ray.address)
        else:
            _start(trainer.n_gpus_per_node, folder)
        import ray

        try:
            _pass_on_logs()
            yield
        finally:
            ray.shutdown()


def _join(address: str) -> None:
    import ray

    try:
        if address != "auto":
            # Ray's own client would end this process where nobody listens.
            socket.create_connection(split_address(address), _ANSWER_S).close()
        ray.init(address=address, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(
            f"trainer.ray.address {address} cannot be joined ({' '.join(str(error).split())}): start the trainer on a "
            "node of a running Ray cluster, with the cluster's token where it has one"
        ) from None


def _start(processes: int, folder: str) -> None:
    """
    Args:
        folder: for Ray's sockets, whose paths must stay below 108 bytes.
    """
    os.environ.update(ray_environment())
    import ray

    where = {"address": "local", "num_cpus": processes, "object_store_memory": _OBJECT_STORE_BYTES}
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(**where, include_dashboard=False, configure_logging=False, _temp_dir=folder)
            return
        except Exception as error:
            # A busy machine lets Ray's own fixed time limits pass; it raises bare Exceptions.
            log.warning("ray_did_not_start", attempt=attempt, detail=str(error))
            if attempt == _STARTS:
                raise
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _pass_on_logs() -> None:
    """Have what ranks write arrive on stderr as it is: Ray's own way would put a prefix before JSON."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def write(message: Mapping[str, Any]) -> None:
        if message.get("actor_name"):  # else it is of Ray's own processes
            sys.stderr.write("".join(f"{line}\n" for line in message["lines"]))
            sys.stderr.flush()

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("forage", write)
