"""The programs of a simulated run: the real trainer, dispatcher, follower and supervisor around a stub of the maths."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import (
    GroundTruth,
    Policy,
    PolicySegment,
    Prompt,
    Replica,
    Score,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_queue.streams.client import StreamClient
from forage_queue.streams.history import open_history
from forage_queue.streams.payloads import FOLDER, Payloads
from forage_queue.streams.prompt_identity import build_group, with_prompt_identity
from forage_records.questions import Question, Questions
from forage_runtime.errors import DiskFullError, FencedError, RolledBackError, UserError
from forage_runtime.files.durable import PARTIAL_PREFIX
from forage_runtime.settings import Settings
from forage_runtime.stop import Stop, Stopped
from forage_runtime.telemetry.health import Health
from forage_trajectory.codec import pack_group
from simulation.event_loop import run_async
from simulation.gpus import TRAINER, SharedGpus
from simulation.policies import Policies, follow_deltas, map_weights
from simulation.storage import ObjectStore
from simulation.stubs import StubWorker, replace_maths
from simulation.world import Process, Signal, World

replace_maths()

from forage_cli.local.processes import Service, ServiceDiedError, Supervisor  # noqa: E402
from forage_queue.rollout import lease_watch  # noqa: E402
from forage_queue.rollout.dispatcher import Dispatcher  # noqa: E402
from forage_queue.trainer import gpu_lease  # noqa: E402
from forage_queue.trainer.batcher import BatchTimeoutError, StaleGroupsError  # noqa: E402
from forage_queue.trainer.gpu_lease import GpuLeaseError  # noqa: E402
from forage_runtime.retries import CALL_TIMEOUT_S, RedisRetry  # noqa: E402
from forage_trainer.checkpoints.start import require_resumable  # noqa: E402
from forage_trainer.loop import TrainingLoop  # noqa: E402
from forage_trainer.run import EXIT_FAILED, EXIT_STOPPED  # noqa: E402
from forage_weights.announcement import PolicyError  # noqa: E402
from forage_weights.cache import PolicyCache  # noqa: E402
from forage_weights.delta import DeltaError  # noqa: E402
from forage_weights.rollout import follower  # noqa: E402
from forage_weights.rollout.policy import is_newer  # noqa: E402
from forage_weights.rollout.preparation import hold_policy  # noqa: E402

follower.POLL_INTERVAL_S = 1.0  # polls are most of what is simulated
gpu_lease._LOOK_S = 0.3
REDIS_TIMEOUT_S = 4.0
"""As in the rollout service, whose module needs Ray."""


class _Stop(Stop):
    """A stop request that wakes sleepers on the virtual clock."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._signal = Signal()

    def request(self) -> None:
        super().request()
        self._world.set(self._signal)

    def sleep(self, seconds: float) -> None:
        if not self.is_requested:
            self._world.wait(self._signal, seconds)
        self.check()


def make_questions(count: int, split: str) -> Questions:
    """Questions without text: the stub engine needs none."""
    rows = (Question("facts", split, i, (), GroundTruth(targets=[str(i)]), str(i)) for i in range(count))
    return Questions(tuple(rows), "digest")


class Programs:
    """Starts the programs of one run.

    caches: the folder of copies of policies that the engines of a rollout service have, by its name.
    note: called with what should be seen in a history; errors: the sentences of trainers that ended with exit code 2.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        questions: tuple[Questions, Questions],
        draw_seconds: Callable[[str], float],
        engines: int,
        policies: Policies,
        store: ObjectStore,
        caches: Mapping[str, Path],
        note: Callable[[str], None],
        gpus: SharedGpus,
    ) -> None:
        self.world = world
        self.gpus = gpus
        self.settings = settings
        self.engines_fail_until = 0.0
        self.engines_stall_until = 0.0
        self.engines_refuse_until = 0.0
        self.next_step_is_bad = False
        self.errors: list[str] = []
        self.is_colocated = settings.trainer.placement == "colocated"
        self.timeouts = 0
        """Trainers that ended because no trajectories came."""
        self.policies = policies
        self.store = store
        self.caches = caches
        self._questions = questions
        self.draw_seconds = draw_seconds
        self._engines = engines
        self._note = note
        self._stops: dict[Process, _Stop] = {}

    def start(self, name: str) -> Process:
        """Start a program by the name of its service."""
        main = self._train if name == "trainer" else self._roll_out
        process = Process(self.world, name, main)
        self._stops[process] = _Stop(self.world)
        return process

    def damage_group_file(self, is_deletion: bool) -> None:
        """Damage or delete the file of a group, if there is one."""
        folder = self.settings.run.folder / FOLDER
        stored = sorted(name for name in self.store.files if "/groups/run/" in name and not name.endswith("/shared"))
        files = sorted(file for file in folder.glob("*/*") if not file.name.startswith(PARTIAL_PREFIX))
        if files:
            file = self.world.random.choice(files)
            file.unlink() if is_deletion else file.write_bytes(file.read_bytes()[:-1] + b"?")
        elif stored:
            name = self.world.random.choice(stored)
            data = self.store.files.pop(name)
            if not is_deletion:
                self.store.files[name] = data[:-1] + b"?"

    def terminate(self, process: Process) -> None:
        """Send SIGTERM."""
        if process.name == "trainer":
            self._stops[process].request()
        else:
            process.end(143)

    def _train(self) -> int:
        """What `forage_trainer.run.run_leader` does, without files of questions and without the engine."""
        world = self.world
        process = world.process
        assert process is not None
        world.sleep(self.draw_seconds("start"))
        worker: Any = StubWorker(self)
        run, trainer, health = self.settings.run, self.settings.trainer, Health()
        history = open_history(run, "trainer")
        streams = StreamClient(self.settings.redis, run.id, CALL_TIMEOUT_S, history, Payloads(self.settings))
        stop = self._stops[process]
        retry, lease = RedisRetry(stop, health), None
        try:
            if trainer.placement == "colocated":
                # The clock of now: its default is the one of the real machine.
                lease = gpu_lease.GpuLease(streams, retry, stop, trainer.batch_timeout_s, time.monotonic)
                require_resumable(self.settings, streams, retry, worker.world_size)
                retry(streams.acquire_epoch)
                lease.acquire()
                self.gpus.take(TRAINER)
            TrainingLoop(self.settings, streams, worker, *self._questions, 0, stop, health, lease).run()
        except Stopped:
            return EXIT_STOPPED
        except UserError as error:
            self._note(f"gives up: {error}")
            self.errors.append(str(error))
            return error.exit_code
        except RolledBackError as error:
            self._note(f"rolls back: {error}")
            return error.exit_code
        except (FencedError, BatchTimeoutError, StaleGroupsError, DiskFullError, GpuLeaseError) as error:
            self.timeouts += isinstance(error, BatchTimeoutError)
            self._note(f"gives up: {error}")
            return EXIT_FAILED
        return 0

    def _roll_out(self) -> int:
        self.world.sleep(self.draw_seconds("start"))
        return run_async(self.world, self._dispatch)

    async def _dispatch(self) -> int:
        world, settings = self.world, self.settings
        process = world.process
        assert process is not None

        def connect() -> StreamClient:
            history = open_history(settings.run, "rollout")
            return StreamClient(settings.redis, settings.run.id, REDIS_TIMEOUT_S, history, Payloads(settings))

        streams = connect()
        names = [f"{process.name}-{process.started:.3f}-{i}" for i in range(self._engines)]
        # A client for each, as each is a process of its own: the history of a process knows one engine.
        engines = [_Engine(self, connect(), name, self.caches[process.name]) for name in names]
        listening: list[_Engine] = []
        has_listener = asyncio.Event()

        async def run_engine(engine: _Engine) -> None:
            await engine.catch_up()
            listening.append(engine)
            has_listener.set()
            await engine.follower.follow()

        async def run_group(prompt: Prompt) -> PackedGroup:
            await has_listener.wait()  # as an agent does: an engine that starts has no address yet
            able = [engine for engine in listening if not engine.out_of_service] or listening
            engine = able[int(world.random.random() * len(able))]
            return pack_group(await engine.sample(prompt, self.draw_seconds("sample")))

        async def ask_engines() -> dict[str, Replica]:
            return {engine.name: engine.follower.describe() for engine in engines}

        async def wait_for_services() -> None:
            await asyncio.sleep(self.draw_seconds("check"))

        dispatcher = Dispatcher(settings, streams, process.name, run_group, ask_engines, wait_for_services)
        await asyncio.gather(dispatcher.run(), *(run_engine(engine) for engine in engines))
        return 1


class _Engine:
    """A stub of the engine: it loads policies by way of a real cache, and samples by waiting."""

    dtype = "float32"
    drains = False

    def __init__(self, programs: Programs, streams: StreamClient, name: str, cache: Path) -> None:
        self._lease_watch = lease_watch.LeaseWatch(streams, name) if programs.is_colocated else None
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self.serving: Policy | None = None
        self._cache = PolicyCache(cache)
        self._loading = asyncio.Lock()
        self._content = ""
        self._weights: dict[str, Any] = {}
        self.out_of_service = ""
        self.difference: float | None = None
        self.name = name
        self.follower = follower.Follower(streams, self, name, self._lease_watch)  # type: ignore[arg-type]
        self._programs = programs

    @property
    def is_asleep(self) -> bool:
        return not self._is_awake.is_set()

    async def fall_asleep(self) -> None:
        self._is_awake.clear()
        await asyncio.sleep(self._programs.draw_seconds("move"))
        self._programs.gpus.free(self.name)

    async def wake_weights(self) -> None:
        self._programs.gpus.take(self.name)
        await asyncio.sleep(self._programs.draw_seconds("move"))

    async def wake_up(self) -> None:
        await self.wake_weights()
        self._is_awake.set()

    async def catch_up(self) -> None:
        """Start, in the engines' shift, and serve what is announced."""
        if self._lease_watch is not None:
            await self._lease_watch.wait_for_engines()
            with self._lease_watch.starting():
                self._programs.gpus.take(self.name)
                await asyncio.sleep(self._programs.draw_seconds("start"))
        await self.follower.catch_up()

    async def load_policy(self, policy: Policy, allow_older: bool = False) -> None:
        if not allow_older and not is_newer(policy, self.serving):
            raise PolicyError("not newer")
        programs, policies = self._programs, self._programs.policies
        async with self._loading:
            if programs.engines_refuse_until > programs.world.now:
                raise PolicyError("the engine refuses it")
            altered = set(programs.store.altered)
            async with hold_policy(self._cache, policy) as held:
                try:
                    mapped = map_weights(held)
                    await asyncio.sleep(programs.draw_seconds("load"))
                    copied = {name: bits.copy() for name, bits in mapped.items()}
                    weights = follow_deltas(held, self._content, self._weights) or copied
                except (OSError, ValueError, DeltaError) as error:
                    raise PolicyError(f"its files cannot be read: {error}") from error
                if not {str(file) for file in held.files}.isdisjoint(programs.store.altered - altered):
                    raise PolicyError("its files were damaged while they were read")
                self._content, self._weights, self.serving = held.content, weights, policy
                self.out_of_service = ""
                policies.check_served(self.name, policy, weights)

    async def sample(self, prompt: Prompt, seconds: float) -> TrajectoryGroup:
        """Sample all trajectories of a prompt; policies that are loaded meanwhile go on with them."""
        if self.out_of_service:
            raise RuntimeError(self.out_of_service)
        used = [self.serving]
        for _ in range(2):
            await self._is_awake.wait()
            await asyncio.sleep(max(seconds / 2, self._programs.engines_stall_until - self._programs.world.now))
            if self._programs.engines_fail_until > self._programs.world.now:
                raise RuntimeError("the engine failed")
            used.append(self.serving)
        if None in used:
            raise RuntimeError("the engine has no policy")
        segments = [
            PolicySegment(version=policy.version, epoch=policy.epoch, begin=i, end=i + 1)
            for i, policy in enumerate(used)
            if policy is not None
        ]
        return build_group(
            prompt, [_build_trajectory(prompt, sample, segments) for sample in range(max(1, prompt.samples))]
        )


def score(uid: str, sample: int) -> float:
    """The reward of a sample: it follows from the question, and about half of the groups of two have equal ones."""
    return float(hashlib.sha256(f"{uid}/{sample}".encode()).digest()[0] % 2)


def _build_trajectory(prompt: Prompt, sample: int, segments: list[PolicySegment]) -> Trajectory:
    total, length = score(prompt.group_uid, sample), len(segments)
    trajectory = Trajectory(
        token_ids=[1] * (length + 1),
        prompt_length=1,
        loss_mask=[1] * length,
        turn_ids=[1] * length,
        logprobs=[-1.0] * length,
        segments=segments,
        score=Score(status=Status.STATUS_OK, total=total),
        validation_score=Score(status=Status.STATUS_OK, total=total),
        finished=True,
        status=Status.STATUS_OK,
    )
    return with_prompt_identity(trajectory, prompt, sample)


class _Handle:
    """A running service as `subprocess.Popen` shows it. is_lost: the supervisor takes it for dead, and it is not."""

    def __init__(self, programs: Programs, process: Process) -> None:
        self.process = process
        self.is_lost = False
        self._programs = programs

    def poll(self) -> int | None:
        return 1 if self.is_lost else self.process.code

    def terminate(self) -> None:
        self._programs.terminate(self.process)

    def kill(self) -> None:
        if not self.is_lost:
            self.process.end()

    def wait(self, timeout: float) -> int:
        if self.process.is_alive:
            self._programs.world.wait(self.process.ended, timeout)
        if self.process.code is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.process.code


class SimulatedSupervisor(Supervisor):
    """The real supervisor; only the start of a process and the search for leftovers are replaced."""

    def __init__(self, programs: Programs) -> None:
        super().__init__()
        self._programs = programs

    def lose(self, name: str) -> Process | None:
        """Take a service for dead although it is not, as where its node is out of reach."""
        handle: Any = self._running[name].process if name in self._running else None
        if handle is None or handle.process.code is not None:
            return None
        handle.is_lost = True
        process: Process = handle.process
        return process

    def leave_services(self) -> list[Process]:
        """Send every service the signal that Linux sends it when its supervisor has died."""
        processes = [running.process.process for running in self._running.values() if running.process is not None]
        for process in processes:
            self._programs.terminate(process)
        return processes

    def _spawn(self, running: Any) -> None:
        running.process = _Handle(self._programs, self._programs.start(running.service.name))
        running.started = time.monotonic()

    def _kill_leftovers(self, running: Any) -> None:
        if running.process is not None and not running.process.is_lost:
            running.process.process.end()


class Operator:
    """Runs `forage up --train` until the trainer is done, and starts it again when it ended before."""

    PATIENCE_S = 10.0

    def __init__(self, programs: Programs, rollouts: int, folder: Path) -> None:
        self.is_done = False
        self.supervisor: SimulatedSupervisor | None = None
        self._is_killed = False
        self._programs = programs
        self._names = [*(f"rollout-{i}" for i in range(1, rollouts + 1)), "trainer"]
        self._log = folder / "service.log"
        self._log.write_text("ended\n")

    def run(self) -> int:
        while not self.is_done:
            self._supervise()
            self._programs.world.sleep(self.PATIENCE_S)
        return 0

    def _supervise(self) -> None:
        supervisor = self.supervisor = SimulatedSupervisor(self._programs)
        self._is_killed = False
        try:
            for name in self._names:
                supervisor.start(Service(name, [name], self._log, job=name == "trainer"))
            while not supervisor.is_done("trainer"):
                self._programs.world.sleep(0.5)
                if self._is_killed:
                    return
                supervisor.tick()
            self.is_done = True
        except (UserError, ServiceDiedError):
            pass
        finally:
            if not self._is_killed:
                supervisor.stop()

    def kill_supervisor(self) -> list[Process]:
        """Kill the supervisor: Linux sends its services SIGTERM. Returns those that live on for now."""
        self._is_killed = True
        assert self.supervisor is not None
        return self.supervisor.leave_services()
