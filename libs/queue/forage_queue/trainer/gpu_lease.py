"""The trainer's lease of GPUs that it shares with the engines: in its shifts they sleep, in theirs they sample.

In its shift every engine that lives has said, for this very shift, that it has freed its memory. An engine that has
died has freed it as well; one that is silent counts as dead. In the engines' shift the trainer's state is in the
host's memory. A trainer that dies in its shift leaves the engines asleep; the next one takes a shift of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from prometheus_client import Counter, Gauge

from forage_proto.v1.trajectory_pb2 import Replica, Shift
from forage_queue.streams.client import LIVELY_S, StreamClient
from forage_runtime.errors import FencedError, ForageError, UnavailableError
from forage_runtime.retries import RedisRetry
from forage_runtime.stop import Stop
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting

SECONDS = Counter(
    "forage_trainer_shift_seconds_total",
    "Time of shifts at shared GPUs: until engines slept, to load the trainer's state, and to offload it",
    ["phase"],
)
OFFLOADED = Gauge("forage_trainer_offloaded_bytes", "GPU memory that the trainer freed last, on rank 0; 0 on CPU")
SLEEP, LOAD, OFFLOAD = "sleep", "load", "offload"
for _phase in (SLEEP, LOAD, OFFLOAD):
    SECONDS.labels(_phase)
BEAT_S = 5.0
"""Between two signs of life: engines wake a minute after the last one."""
_LOOK_S = 0.05
SETTLE_S = 6.0
"""Of a first shift: an engine that a server has forgotten says within 5 s that it is there."""
_FORGET_S = 86_400
"""What an engine said longer ago is of no interest: it has died long since."""


class GpuLeaseError(ForageError):
    """Engines did not free shared GPUs in time, or took them back from a trainer that stood still."""


class GpuState(Protocol):
    """What computes on the GPUs in the trainer's shifts."""

    def move_to_gpu(self) -> None:
        """Move everything to the GPUs."""

    def move_to_host(self) -> int:
        """Move everything to the host's memory; returns the bytes that this has freed."""


class GpuLease:
    """The lease of the GPUs that a trainer shares with engines: it holds them in its shifts, with signs of life.

    Args:
        limit_s: how long engines may take to fall asleep.
        clock: the seconds that pass.
    """

    def __init__(
        self,
        streams: StreamClient,
        retry: RedisRetry,
        stop: Stop,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._stop = stop
        self._retry = retry
        self._limit_s = limit_s
        self._clock = clock
        self._shift = Shift()
        self._lock = threading.Lock()
        self._error = ""
        self._known: set[str] = set()
        self._dead: set[str] = set()
        self._is_first = True
        self._available_since = 0.0
        self._depth = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gpu-lease", daemon=True)
        self.seconds: dict[str, float] = {}
        """Seconds of the last shift by phase."""

    def acquire(self) -> None:
        """Begin the trainer's shift; return once all engines sleep. A trainer that has it begins it anew.

        Raises:
            GpuLeaseError: an engine did not sleep in time; or engines took the GPUs back meanwhile.
            FencedError: a later trainer has taken over.
        """
        self._set(is_trainers=True)
        began = self._available_since = self._clock()
        if not self._thread.is_alive():
            self._thread.start()
        why = "it has a limit of its own, which names the engines"
        with waiting("engines to sleep", on="rollout", limit_s=None, why_unlimited=why) as wait:
            while missing := self._find_awake():
                self._retry(self._streams.check_epoch)  # a later trainer's shift is not waited for
                self._check()  # engines that took this one back do not sleep any more
                if self._clock() - began > self._limit_s:
                    raise GpuLeaseError(
                        f"{', '.join(missing)} did not free the GPUs within trainer.batch_timeout_s = "
                        f"{self._limit_s:g} s: does the rollout service have trainer.placement=colocated, too?"
                    )
                wait.detail = ", ".join(missing)
                self._stop.sleep(_LOOK_S)  # wait: named just above
        self._retry(self._streams.check_epoch)
        self._check()
        self._is_first = False
        self._count(SLEEP, self._clock() - began)
        get_logger().info("shift_taken", shift=self._shift.number, seconds=self.seconds[SLEEP])

    def release(self) -> None:
        """Begin the engines' shift.

        Raises:
            FencedError: a later trainer has taken over.
        """
        self._set(is_trainers=False)

    @contextmanager
    def hold(self, state: GpuState) -> Iterator[Mapping[str, float]]:
        """Compute in a shift of the trainer's, which may be the one that it has; yields the seconds of its beginning.

        After an error nothing is released: the state may still be on the GPUs. It goes with this process, and engines
        wake when the next trainer gives them a shift, or a minute after this one's last sign of life.

        Raises:
            GpuLeaseError: as `acquire`; or engines took the GPUs back meanwhile.
        """
        self._depth += 1
        try:
            if self._depth == 1 and (not self._shift.is_trainers or self._shift.epoch != self._streams.epoch):
                has_state = self._shift.is_trainers
                self.acquire()
                if not has_state:
                    with self._measure(LOAD):
                        state.move_to_gpu()
            yield self.seconds
            self._check()
        finally:
            self._depth -= 1
        if not self._depth:
            with self._measure(OFFLOAD):
                OFFLOADED.set(state.move_to_host())
            self.release()

    def _check(self) -> None:
        """
        Raises:
            GpuLeaseError: engines took the GPUs back meanwhile.
        """
        if self._error:
            raise GpuLeaseError(self._error)

    def close(self) -> None:
        """End the signs of life."""
        self._ended.set()

    @contextmanager
    def _measure(self, phase: str) -> Iterator[None]:
        began = self._clock()
        yield
        self._count(phase, self._clock() - began)

    def _count(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = round(seconds, 3)
        SECONDS.labels(phase).inc(seconds)

    def _set(self, is_trainers: bool) -> None:
        def send() -> None:
            with self._lock:
                self._streams.set_shift(shift)
                self._shift = shift

        shift = Shift(epoch=self._streams.epoch, number=self._shift.number + 1, is_trainers=is_trainers)
        self._retry(send)

    def _read_replicas(self, silence_s: int) -> dict[str, Replica]:
        def read() -> dict[str, Replica]:
            try:
                return self._streams.read_replicas(silence_s)
            except UnavailableError:
                self._available_since = self._clock()
                self._dead.clear()
                raise

        return self._retry(read)

    def _find_awake(self) -> list[str]:
        """Name the engines that may use the GPUs.

        Whoever is silent counts as dead only once there was time for signs of life: none could be given while Redis was
        away, and a server that has lost its data knows nobody.
        """
        lively, known = self._read_replicas(LIVELY_S), self._read_replicas(_FORGET_S)
        waited_s = self._clock() - self._available_since
        self._known |= known.keys()
        self._dead -= lively.keys()
        if self._is_first and waited_s < SETTLE_S:
            return ["engines not heard of yet"]
        if waited_s > LIVELY_S:
            self._dead |= self._known - lively.keys()
        elif not known:
            return ["no engine at all"]
        shift = self._shift.epoch, self._shift.number
        asleep = {name for name, one in known.items() if (one.asleep.epoch, one.asleep.number) == shift}
        return sorted(self._known - self._dead - asleep)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):  # wait: pause between two signs of life
            with suppress(UnavailableError, FencedError), self._lock:
                if self._shift.is_trainers and not self._error:
                    self._give_sign()

    def _give_sign(self) -> None:
        sign = Shift()
        sign.CopyFrom(self._shift)
        sign.beat += 1
        if self._streams.replace_shift(self._shift, sign):
            self._shift = sign
            return
        found = self._streams.read_shift()
        if found is None:  # the server has lost its data
            self._streams.set_shift(self._shift)
        elif (found.epoch, found.number) == (sign.epoch, sign.number):  # the reply to a sign was lost
            self._shift = found
        else:
            self._error = (
                "shared GPUs were taken back, by engines or a later trainer: this trainer gave no sign of life for too "
                "long; it ends, and the next start resumes"
            )
