"""The trainer takes shared GPUs once every engine that lives sleeps, and gives them back, with a real Redis server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from waiting import WAIT_S, wait_until

from forage_proto.v1.trajectory_pb2 import Replica, Shift
from forage_queue.streams.client import StreamClient
from forage_queue.trainer import gpu_lease
from forage_queue.trainer.gpu_lease import GpuLease, GpuLeaseError
from forage_runtime.errors import FencedError, UnavailableError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import RedisSettings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health


class State:
    """What is moved; notes whose shift it is then."""

    def __init__(self, client: StreamClient) -> None:
        self._client = client
        self.moves: list[tuple[str, bool]] = []

    def _note(self, move: str) -> None:
        shift = self._client.read_shift()
        self.moves.append((move, shift is not None and shift.is_trainers))

    def move_to_gpu(self) -> None:
        self._note("gpu")

    def move_to_host(self) -> int:
        self._note("host")
        return 7


class Clock:
    """Seconds that pass only when the trainer looks at the clock: `step_s` each time."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


class Bench:
    def __init__(self, settings: RedisSettings) -> None:
        self.server = redis.Redis.from_url(settings.url)
        self.client = StreamClient(settings, "r", WAIT_S)
        self.client.acquire_epoch()
        self.engines = StreamClient(settings, "r", WAIT_S)
        self.state = State(self.engines)
        self.made: list[GpuLease] = []

    def make(self, limit_s: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> GpuLease:
        stop = Stop()
        own = GpuLease(self.client, RedisRetry(stop, Health()), stop, limit_s, clock)
        self.made.append(own)
        return own

    def say(self, name: str, asleep: Shift | None = None) -> None:
        self.engines.acknowledge_policy(name, Replica(asleep=asleep))

    def silence(self, name: str) -> None:
        """Let the last word of an engine be a minute old."""
        self.server.zadd(self.client.key("alive"), {name: time.time() - 60})

    def expire_once_asleep(self, name: str) -> Callable[[], float]:
        """A clock that stands still until an engine sleeps, and then shows that every limit is over.

        The first look is the beginning, which limits are measured from: the engine may sleep by then.
        """
        has_begun = False

        def tell() -> float:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                return 0.0
            replica = self.engines.read_replicas().get(name)
            return 1e6 if replica is not None and replica.asleep.is_trainers else 0.0

        return tell

    def obey(self, name: str, ended: threading.Event) -> None:
        """An engine: sleeps whenever it is told to."""
        while not ended.wait(0.02):  # lint: short because it is the pause between two looks
            shift = self.engines.read_shift()
            self.say(name, shift if shift is not None and shift.is_trainers else None)

    def run_engine(self, name: str) -> Callable[[], None]:
        ended = threading.Event()
        thread = threading.Thread(target=self.obey, args=(name, ended))
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        return end


@pytest.fixture
def bench(redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(gpu_lease, "SETTLE_S", 0.0)
    own = Bench(redis_server)
    yield own
    for one in own.made:
        one.close()


def test_the_state_is_on_the_gpus_in_the_trainers_shift_alone_and_moved_once(bench: Bench) -> None:
    own, end = bench.make(), bench.run_engine("one")
    try:
        own.acquire()
        with own.hold(bench.state):
            assert bench.state.moves == [], "it was built there"
        for _ in range(2):
            with own.hold(bench.state) as seconds, own.hold(bench.state):
                assert bench.engines.read_shift().is_trainers  # type: ignore[union-attr]
                assert {"sleep", "load", "offload"} == set(seconds)
            assert not bench.engines.read_shift().is_trainers  # type: ignore[union-attr]
    finally:
        end()
    assert bench.state.moves == [("host", True), *[("gpu", True), ("host", True)] * 2]


def test_a_new_epoch_begins_the_shift_anew_without_moving_anything(bench: Bench) -> None:
    own, end = bench.make(), bench.run_engine("one")
    try:
        own.acquire()
        bench.client.acquire_epoch()
        with own.hold(bench.state):
            assert bench.engines.read_shift().epoch == bench.client.epoch  # type: ignore[union-attr]
            assert bench.state.moves == []
    finally:
        end()


def test_an_engine_that_does_not_sleep_is_named(bench: Bench) -> None:
    own, end = bench.make(0.5, bench.expire_once_asleep("obeys")), bench.run_engine("obeys")
    bench.say("refuses")
    try:
        with pytest.raises(
            GpuLeaseError, match=r"^refuses did not free the GPUs within trainer\.batch_timeout_s = 0\.5"
        ):
            own.acquire()
    finally:
        end()


def test_a_word_for_another_shift_does_not_count(bench: Bench) -> None:
    own, end = bench.make(0.5, bench.expire_once_asleep("obeys")), bench.run_engine("obeys")
    bench.say("slow", Shift(epoch=bench.client.epoch, number=7, is_trainers=True))
    try:
        with pytest.raises(GpuLeaseError, match=r"^slow did not free"):
            own.acquire()
    finally:
        end()


def test_silent_engines_count_as_dead_once_they_could_have_spoken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease, "LIVELY_S", 10)
    bench.say("dead")
    bench.silence("dead")
    clock = Clock(step_s=0.5)
    own, end = bench.make(clock=clock), bench.run_engine("lives")
    try:
        own.acquire()
        assert clock.now > 10.0, "Redis may have been away, and the engine may live"
        own.release()
        clock.step_s = 0.0
        own.acquire()  # no time passes: it is dead
    finally:
        end()


def test_nobody_counts_as_dead_for_the_time_in_which_redis_was_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease, "LIVELY_S", 1)
    monkeypatch.setattr("forage_runtime.retries._RETRY_INTERVAL_S", 0.0)
    bench.say("lives")
    bench.silence("lives")
    clock = Clock()
    own = bench.make(clock=clock)
    real, looks = bench.client.read_replicas, 0

    def read_replicas(silence_s: int) -> dict[str, Replica]:
        nonlocal looks
        looks += 1
        clock.now += 0.2
        if 4 < looks < 10:  # as long as LIVELY_S
            raise UnavailableError("away")
        return real(silence_s)

    monkeypatch.setattr(bench.client, "read_replicas", read_replicas)
    own.acquire()
    assert looks > 10, "Redis came back before it was over"
    assert clock.now > 9 * 0.2 + 1.0, "the last attempt failed after 1.8 s, and then there was time to say so"


def test_a_server_that_knows_no_engine_may_have_lost_them(bench: Bench) -> None:
    clock = Clock(step_s=5.0)
    bench.make(clock=clock).acquire()
    assert clock.now > gpu_lease.LIVELY_S


def test_a_first_shift_waits_for_engines_that_a_server_may_have_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease, "SETTLE_S", 6.0)
    clock = Clock(step_s=0.5)
    own, end = bench.make(clock=clock), bench.run_engine("one")
    try:
        own.acquire()
        assert clock.now >= 6.0
        clock.step_s = 0.0
        own.acquire()  # no time passes
    finally:
        end()


def test_signs_of_life_survive_lost_data_and_tell_when_the_shift_was_taken_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease, "BEAT_S", 0.05)
    own, end = bench.make(), bench.run_engine("one")

    def await_beat(beyond: int) -> Shift:
        def read() -> Shift | None:
            shift = bench.engines.read_shift()
            return shift if shift is not None and shift.beat > beyond else None

        found = wait_until(read)
        assert found is not None
        return found

    try:
        own.acquire()
        before = await_beat(2)
        bench.server.flushall()
        assert await_beat(before.beat).number == before.number
        with pytest.raises(GpuLeaseError, match="shared GPUs were taken back"), own.hold(bench.state):  # noqa: PT012
            while not bench.engines.replace_shift(await_beat(0), Shift(epoch=1, number=99)):
                pass
            wait_until(lambda: own._error)
        assert bench.state.moves == [], "what is on the GPUs then is gone with the process"
    finally:
        end()


def test_an_older_trainer_cannot_put_engines_to_sleep(bench: Bench, redis_server: RedisSettings) -> None:
    later = StreamClient(redis_server, "r", WAIT_S)
    later.acquire_epoch()
    with pytest.raises(FencedError):
        bench.make().acquire()
    assert bench.engines.read_shift() is None


def test_a_trainer_that_is_replaced_while_it_waits_ends(bench: Bench, redis_server: RedisSettings) -> None:
    bench.say("busy")
    own = bench.make()
    later = StreamClient(redis_server, "r", WAIT_S)
    replacing = threading.Timer(0.1, later.acquire_epoch)
    replacing.start()
    with pytest.raises(FencedError):
        own.acquire()
    replacing.join()


def test_a_trainer_whose_shift_is_taken_back_while_it_waits_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that stood still meanwhile: engines that sample again will not sleep for it."""
    monkeypatch.setattr(gpu_lease, "BEAT_S", 0.05)
    bench.say("busy")
    own = bench.make()

    def take_back() -> None:
        while (shift := bench.engines.read_shift()) is None or not bench.engines.replace_shift(
            shift, Shift(epoch=shift.epoch, number=shift.number + 1)
        ):
            time.sleep(0.01)

    engine = threading.Thread(target=take_back)
    engine.start()
    with pytest.raises(GpuLeaseError, match="shared GPUs were taken back"):
        own.acquire()
    engine.join()


def test_an_error_in_a_shift_leaves_engines_asleep(bench: Bench) -> None:
    own, end = bench.make(), bench.run_engine("one")
    try:
        with pytest.raises(ValueError, match="broken"), own.hold(bench.state):
            raise ValueError("broken")
        assert bench.engines.read_shift().is_trainers  # type: ignore[union-attr]
        assert bench.state.moves == [("gpu", True)]
    finally:
        end()
