"""Faults at commits: what changes Redis or the disk is counted, and the fault that a scenario has there happens."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import redis

from forage_queue.streams.history import FOLDER, History
from simulation.machine import Disk
from simulation.policies import damage_cache
from simulation.programs import Operator, Programs
from simulation.redis_server import Server
from simulation.scenario import Fault
from simulation.world import Killed, Process, World

_READS = {"hget", "hgetall", "xlen", "exists", "get", "ping", "xpending", "find_absent", "read_replicas", "info"}
_READS |= {"xread", "function load", "unknown function", "memory usage"}
_OF_REDIS = {"lost reply", "redis down", "redis lost", "redis tail lost", "out of reach"}
_LOSSES = {"redis lost", "redis tail lost", "prompt deleted", "group deleted", "group garbled"}
_LOSSES |= {"file damaged", "file deleted"}
_PUBLISHED = "write policies/v"
_CLAIMS = {"xreadgroup", "xautoclaim", "claim"}


class Faults:
    """Counts the commits of every service and injects the faults of a scenario."""

    def __init__(
        self, world: World, faults: Iterable[Fault], server: Server, disk: Disk, checkpoints: Path, is_traced: bool
    ) -> None:
        self.injected: list[Fault] = []
        self.zombies: list[Process] = []
        """Trainers that were replaced while they lived."""
        self.history: list[str] = []
        self.programs: Programs
        self.operator: Operator
        self._world = world
        self._due = {(fault.service, fault.commit): fault for fault in faults}
        self._server = server
        server.keeps_copies = any(fault.kind == "redis tail lost" for fault in self._due.values())
        self._disk = disk
        self._checkpoints = checkpoints
        self.is_traced = is_traced
        self._commits: dict[str, int] = {}

    def note(self, text: str) -> None:
        """Add a line to the history."""
        if self.is_traced:
            process = self._world.process
            name = f"{process.name}@{process.started:.0f}" if process is not None else "-"
            text = text.replace(str(self._checkpoints.parent), "runs/run")
            self.history.append(f"{self._world.now:9.3f}  {name:14} {text}")

    def on_command(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a command for the client; a fault may come before or after it."""
        if name in _READS:
            return run()
        if name not in _CLAIMS:
            return self.on_change(name, run)
        before = self._server.store.changes
        result = run()
        if self._server.store.changes != before:
            fault = self._count(name)
            if fault is not None:
                self._strike(fault)
        return result

    def on_change(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a change of Redis or the disk; a fault may come before or after it."""
        fault = self._count(name)
        is_file = name.startswith(("write ", "delete ", "retire "))
        if fault is None or (is_file and fault.kind in _OF_REDIS):
            return self._run(name, run)
        if fault.kind.endswith("before"):
            self._strike(fault)
            return self._run(name, run)
        result = self._run(name, run)
        self._strike(fault)
        return result

    def _run(self, name: str, run: Callable[[], Any]) -> Any:
        result = run()
        if name == "publish":
            self.programs.policies.check_announced()
        elif name.startswith(_PUBLISHED):
            folder = f"{(self._checkpoints.parent / name.removeprefix('write ')).resolve()}/"
            altered = self.programs.store.altered
            altered -= {address for address in altered if address.startswith(folder)}
        return result

    def _count(self, name: str) -> Fault | None:
        process = self._world.process
        if process is None:
            return None
        number = self._commits[process.name] = self._commits.get(process.name, 0) + 1
        self.note(f"{number:4} {name}")
        return self._due.pop((process.name, number), None)

    def _strike(self, fault: Fault) -> None:
        world, process = self._world, self._world.process
        assert process is not None
        self.note(f"     FAULT {fault}")
        self.injected.append(fault)
        if fault.kind in _LOSSES:
            folder = self._checkpoints.parent / FOLDER
            with History(folder, "run", "fault").record("lose_data", {"kind": fault.kind}):
                pass
        match fault.kind:
            case "crash before" | "crash after":
                if fault.delay_s:
                    world.at(world.now + fault.delay_s, process.end)
                else:
                    process.end()
                    raise Killed
            case "pause before" | "pause after":
                self._pause(process, fault.seconds)
            case "lost reply":
                raise redis.TimeoutError("timeout reading from socket")
            case "redis down":
                self._server.down_until = world.now + fault.seconds
                raise redis.ConnectionError("connection closed by server")
            case "second trainer":
                supervisor = self.operator.supervisor
                lost = supervisor.lose("trainer") if supervisor is not None else None
                if lost is not None:
                    self.zombies.append(lost)
                self._pause(process, fault.seconds)
            case "damaged checkpoint":
                self._damage_newest()
                process.end()
                raise Killed
            case "disk full" if not any(self._checkpoints.parent.glob("policies/v*")):
                pass  # a run that has not begun is refused, and nobody starts it again
            case "disk full":
                self._disk.full_until = world.now + fault.seconds
            case "clock jump":
                world.wall_offset += fault.seconds
            case "redis lost":
                self._server.forget_all()
                raise redis.ConnectionError("connection closed by server")
            case "redis tail lost":
                self._server.forget_tail(fault.seconds)
                raise redis.ConnectionError("connection closed by server")
            case "out of reach":
                self._server.unreachable_until[process] = world.now + fault.seconds
                raise redis.TimeoutError("timeout reading from socket")
            case "prompt deleted":
                self._server.delete_entry(is_prompt=True)
            case "group deleted":
                self._server.delete_entry(is_prompt=False)
            case "group garbled":
                self._server.garble_group()
            case "group forged":
                self._server.forge_group()
            case "engines fail":
                self.programs.engines_fail_until = world.now + fault.seconds
            case "engines stall":
                self.programs.engines_stall_until = world.now + fault.seconds
            case "bad step":
                self.programs.next_step_is_bad = True
            case "policy damaged" | "policy deleted":
                self.programs.policies.damage(is_deletion=fault.kind == "policy deleted")
            case "cache damaged":
                damage_cache(world, self.programs.store, self._pick_cache())
            case "cache lost":
                shutil.rmtree(self._pick_cache(), ignore_errors=True)
            case "file damaged" | "file deleted":
                self.programs.damage_group_file(is_deletion=fault.kind == "file deleted")
            case "policies refused":
                self.programs.engines_refuse_until = world.now + fault.seconds
            case "storage down":
                self.programs.store.down_until = world.now + fault.seconds
            case "supervisor killed":
                self.zombies += self.operator.kill_supervisor()
            case "stop":
                self.programs.terminate(process)
            case kind:
                raise ValueError(kind)
        world.check_alive()

    def _pick_cache(self) -> Path:
        return self._world.random.choice(sorted(set(self.programs.caches.values())))

    def _pause(self, process: Process, seconds: float) -> None:
        if seconds:
            process.paused_until = self._world.now + seconds
            self._world.sleep(0.0)

    def _damage_newest(self) -> None:
        def step(folder: Path) -> float:
            number = folder.name.removeprefix("step_")
            return int(number) if number.isdigit() else -math.inf

        folders = sorted(self._checkpoints.glob("step_*"), key=step)
        if folders:
            file = folders[-1] / "state" / "weights.json"
            with file.open("ab") as damaged:
                damaged.write(b" ")
