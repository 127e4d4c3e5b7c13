"""`make bench-scale`: 100, 1,000 and 10,000 concurrent trajectories, without a model.

Real: Redis, the reward service, and the rollout's Ray Serve application with its dispatchers, agents and the wire
between agents and engines. Stand-ins: the engines sample by waiting (a token takes 20 ms), the retriever answers after
0.2 to 2 s, and this process is the trainer's end of the streams. Each trajectory has about 2,000 tokens, of which four
generations sampled half; its groups have five. At first and after a warm-up all is idle for some seconds: what the
processes use then is not counted to any trajectory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil
import workload
from arithmetic import MEASURED
from measures import RAY, Processes, Reading, RedisReading, Watch, read_redis
from report import IDLE_S, Measured, describe_trajectory, print_report, summarize
from rich.console import Console
from rich.status import Status

from forage_cli.local.home import find_home, find_interpreter
from forage_cli.local.processes import interrupt_on_signals
from forage_cli.local.redis import users as redis_users
from forage_cli.local.serving import wait_until_ready
from forage_cli.local.stack import Program, Stack, shift_ports
from forage_proto.v1 import trajectory_pb2 as pb
from forage_queue.streams.client import StreamClient
from forage_queue.streams.users import Role
from forage_runtime.settings import Settings, load_settings
from forage_trajectory.trajectory import Group

HERE = Path(__file__).resolve().parent
SIZES = (100, 1000, 10_000)
ROUNDS = {100: 6, 1000: 2}
"""Trajectories of a size are so many times those in flight; where there are few, a short run would say little."""
_WARM_UP = 100
_NO_GROUP_S = 300.0


class Rollout:
    """The rollout's application in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._asking = threading.Lock()

    def take_counts(self) -> dict[str, dict[str, float]]:
        """See `rollout_service`."""
        counts: dict[str, dict[str, float]] = self._ask("counts")
        return counts

    def list_waits(self) -> list[dict[str, Any]]:
        """See `rollout_service`."""
        waits: list[dict[str, Any]] = self._ask("waits")
        return waits

    def read_reply(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the rollout's application ended: see rollout.log in runs/bench-scale/logs")
        return json.loads(line)

    def _ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        with self._asking:
            print(question, file=self.process.stdin, flush=True)
            return self.read_reply()


class Bench:
    """The trainer's end of a run, and the measurements of its processes."""

    def __init__(self, streams: StreamClient, run_id: str, processes: Processes, rollout: Rollout) -> None:
        self._streams = streams
        self._run_id = run_id
        self._processes = processes
        self._rollout = rollout
        self._batch = 0
        self._idle: dict[str, float] = {}
        """Part → CPU seconds a second while nothing is in flight."""

    def measure_idle(self) -> dict[str, float]:
        """Measure what the processes use while they have nothing to do."""
        before = self._processes.read()
        time.sleep(IDLE_S)
        used = _subtract(self._processes.read(), before)
        self._idle = {part: seconds / IDLE_S for part, seconds in used.items()}
        return self._idle

    def measure(self, concurrent: int, trajectories: int) -> Measured:
        """Keep so many trajectories in flight until all have ended."""
        measured = Measured(concurrent)
        redis, cpu = read_redis(self._streams), self._processes.read()
        last = self._rollout.take_counts()

        def look() -> None:
            nonlocal last
            now = self._rollout.take_counts()
            for deployment, counts in now.items():
                looks = counts["loop_looks"] - last[deployment]["loop_looks"]
                late = counts["loop_late_seconds"] - last[deployment]["loop_late_seconds"]
                if looks:
                    measured.late_s.setdefault(deployment, []).append(late / looks)
            measured.peak_in_flight = max(measured.peak_in_flight, int(now["Agent"].get("samples_in_flight", 0)))
            last = now

        def weigh() -> None:
            measured.memory = max(measured.memory, sum(self._processes.read().memory.values()))
            measured.redis_memory = max(measured.redis_memory, read_redis(self._streams).memory)

        began = time.perf_counter()
        with Watch(1.0, look), Watch(2.0, weigh):
            ends = self._run(concurrent, trajectories, measured)
        measured.seconds = ends[-1] - began
        # The last tenth of the groups, over the time that it would take at the mean rate.
        measured.tail_s = max(0.0, ends[-1] - ends[int(0.9 * len(ends)) - 1] - 0.1 * measured.seconds)
        used = _subtract(self._processes.read(), cpu)
        measured.cpu_s = {part: max(0.0, s - self._idle.get(part, 0.0) * measured.seconds) for part, s in used.items()}
        now = read_redis(self._streams)
        measured.redis = RedisReading(
            now.commands - redis.commands, now.bytes_in - redis.bytes_in, now.bytes_out - redis.bytes_out, now.memory
        )
        return measured

    def _run(self, concurrent: int, trajectories: int, measured: Measured) -> list[float]:
        """Issue prompts and claim their groups. Returns when each group came."""
        groups, room = trajectories // workload.SAMPLES, concurrent // workload.SAMPLES
        self._batch += 1
        issued, ends = 0, []
        deadline = time.monotonic() + _NO_GROUP_S
        while len(ends) < groups:
            while issued < groups and issued - len(ends) < room:
                self._issue(issued)
                issued += 1
            entries = self._streams.claim_groups(self._streams.trajectories, 64, 1.0)
            now = time.perf_counter()
            for entry in entries:
                ends.append(now)
                _check_group(entry.message, measured)
            self._streams.discard(self._streams.trajectories, [entry.id for entry in entries])
            if entries:
                deadline = time.monotonic() + _NO_GROUP_S
            elif time.monotonic() > deadline:
                self._give_up(groups - len(ends), groups)
        return ends

    def _give_up(self, missing: int, groups: int) -> NoReturn:
        lines = [f"{missing} of {groups} groups did not come: see runs/bench-scale/logs. What the replicas wait for:"]
        for wait in self._rollout.list_waits():
            detail = wait["detail"] or wait["why_unlimited"]
            lines.append(
                f"  {wait['process']}: {wait['count']} × {wait['what']}, on {wait['on']}, "
                f"for {wait['waited_s']} s: {detail}"
            )
        sys.exit("\n".join(lines))

    def _issue(self, position: int) -> None:
        uid = f"{workload.DATA_SOURCE}/{self._batch}/{position}"
        prompt = pb.Prompt(
            run_id=self._run_id,
            group_uid=uid,
            data_source=workload.DATA_SOURCE,
            messages=[pb.ChatMessage(role="user", content=workload.build_question(uid))],
            ground_truth=pb.GroundTruth(targets=["Ulaanbaatar"]),
            samples=workload.SAMPLES,
            sampling=pb.Sampling(temperature=1.0, seed=1 + position * workload.SAMPLES),
            batch=self._batch,
            position=position,
            min_policy_version=1,
            issued_unix_ms=int(time.time() * 1000),
        )
        self._streams.issue(prompt)


def _check_group(group: Group, measured: Measured) -> None:
    longest = max(trajectory.timings.total_s for trajectory in group.trajectories)
    for trajectory in group.trajectories:
        problem = trajectory.status_detail or trajectory.score.detail
        is_whole = trajectory.status == pb.STATUS_OK and trajectory.score.status == pb.STATUS_OK
        if not is_whole or not trajectory.finished or trajectory.score.total <= 0:
            measured.errors += 1
            problem = problem or "the trajectory has no answer, or a wrong score"
            measured.problems[problem] = measured.problems.get(problem, 0) + 1
            continue
        measured.completed += 1
        measured.generations += len(trajectory.turns)
        measured.searches += sum(turn.executed for turn in trajectory.turns)
        measured.tokens += trajectory.counts.tokens
        measured.sampled += trajectory.counts.sampled
        measured.took_s.append(trajectory.timings.total_s)
        measured.lost_s.append(longest - trajectory.timings.total_s)


def _subtract(now: Reading, before: Reading) -> dict[str, float]:
    return {part: seconds - before.cpu_s.get(part, 0.0) for part, seconds in now.cpu_s.items()}


def list_overrides(folder: Path, base: int, agents: int, dispatchers: int, engines: int, most: int) -> list[str]:
    """List the settings of the run."""
    slots = -(-most // engines)
    return [
        *shift_ports(base),
        f"run.dir={folder}",
        "run.id=bench-scale",
        f"model.path={find_home()}/models/tiny-policy",
        f"reward.routes.{workload.DATA_SOURCE}={{name: search_r1_format}}",
        f"data.train_batch_size={most}",  # the trainer's end reads at once: its backlog is not what is measured
        f"rollout.n={workload.SAMPLES}",
        f"rollout.max_turns={workload.MAX_TURNS}",
        "rollout.max_start_length=512",
        "rollout.max_prompt_length=3584",
        f"rollout.max_response_length={workload.MAX_RESPONSE}",
        f"rollout.max_obs_length={workload.MAX_OBSERVATION}",
        f"rollout.max_groups_in_flight={most}",
        # Two cores that do the work of many are late: what waits is no failure here.
        "rollout.trajectory_timeout_s=1800",
        "rollout.retrieve_timeout_s=300",
        "rollout.score_timeout_s=300",
        "rollout.engine.max_model_len=4096",
        f"rollout.engine.max_num_seqs={slots}",
        f"rollout.engine_replicas={{min: {engines}, max: {engines}}}",
        f"rollout.max_agents={agents}",
        f"rollout.max_dispatchers={dispatchers}",
    ]


def build_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORAGE__")}
    return inherited | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def start_process(command: Sequence[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process until the block ends: the end of its stdin, or SIGTERM, ends it."""
    pipe = subprocess.PIPE
    environment = build_environment() | variables
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=file, env=environment, text=True, encoding="utf-8"
        ) as process,
    ):
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def start_bench(settings: Settings, token_s: float, spinner: Status) -> Iterator[Bench]:
    """Start everything, until the block ends."""
    shutil.rmtree(settings.run.folder, ignore_errors=True)
    with ExitStack() as ends:
        stack = Stack(settings, (Program.REDIS, Program.REWARD))
        ends.callback(stack.stop)
        stack.start()
        stack.wait_for_redis()
        wait_until_ready(stack, spinner)
        trainers = stack.log_in(Role.TRAINER)
        streams = StreamClient(trainers.redis, trainers.run.id)
        streams.create_groups()
        streams.publish(pb.Policy(version=1, epoch=streams.acquire_epoch()))
        folder = stack.folder
        retrieving = [
            str(find_interpreter(Program.REWARD)),
            str(HERE / "retriever.py"),
            settings.retriever.http_address,
        ]
        retriever = ends.enter_context(start_process(retrieving, folder / "logs" / "retriever.log"))
        ends.callback(retriever.terminate)
        spinner.update("rollout: Ray, dispatchers, agents, engines")
        rolling = [str(find_interpreter(Program.ROLLOUT)), str(HERE / "rollout_service.py"), f"{folder}/settings.yaml"]
        variables = redis_users.list_variables(folder / "redis", Role.ROLLOUT)
        rollout = Rollout(
            ends.enter_context(
                start_process(rolling, folder / "logs" / "rollout.log", FORAGE_SCALE_TOKEN_S=str(token_s), **variables)
            )
        )
        rollout.read_reply()
        roots = {str(program): psutil.Process(stack.supervisor.pid(program)) for program in stack.programs}
        roots |= {RAY: psutil.Process(rollout.process.pid), "retriever's stand-in": psutil.Process(retriever.pid)}
        yield Bench(streams, trainers.run.id, Processes("trainer's end", roots), rollout)


def find_base_port() -> int:
    """A port from which the next 50 are free."""
    for base in range(22000, 32000, 50):
        probes = [socket.socket() for _ in range(50)]
        try:
            if all(probe.connect_ex(("127.0.0.1", base + offset)) for offset, probe in enumerate(probes)):
                return base
        finally:
            for probe in probes:
                probe.close()
    sys.exit("no free range of 50 ports")


def measure_bytes() -> dict[str, float]:
    """Bytes of trajectories on the stream; see bytes.py."""
    command = [str(find_interpreter(Program.TRAINER)), str(HERE / "bytes.py")]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=build_environment(), text=True, check=True, encoding="utf-8"
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="trajectories at once")
    parser.add_argument("--rounds", type=int, default=0, help="trajectories of a size, over those at once")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--dispatchers", type=int, default=1)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument(
        "--write", action="store_true", help="renew measured.json, from which lab/results/scale.md is computed"
    )
    parser.add_argument("--token-ms", type=float, default=20.0, help="from one token of a sequence to its next")
    options = parser.parse_args()
    console = Console()
    folder, sizes = find_home() / "runs", sorted(options.sizes)
    overrides = list_overrides(
        folder, find_base_port(), options.agents, options.dispatchers, options.engines, max(sizes)
    )
    settings = load_settings(None, overrides)
    results = []
    with (
        interrupt_on_signals(),
        console.status("starting") as spinner,
        start_bench(settings, options.token_ms / 1000, spinner) as bench,
    ):
        spinner.update("warm-up")
        bench.measure(_WARM_UP, _WARM_UP)
        idle = bench.measure_idle()
        for size in sizes:
            spinner.update(f"{size} trajectories at once")
            measured = bench.measure(size, size * (options.rounds or ROUNDS.get(size, 1)))
            results.append(measured)
            console.print(f"{size} at once: {measured.completed} in {measured.seconds:.0f} s, {measured.errors} errors")
        spinner.update("stopping")
    print_report(console, results, idle)
    sizes_on_stream = measure_bytes()
    if options.write:
        MEASURED.write_text(
            json.dumps(describe_trajectory(results[-1]) | sizes_on_stream, indent=1) + "\n", encoding="utf-8"
        )
    print(json.dumps(summarize(results) | sizes_on_stream))
    if any(measured.errors for measured in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
