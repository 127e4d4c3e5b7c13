"""What is kept of a run that hangs: what each part waits for, who runs, the ends of the logs."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import redis

from chaos.stack import FORAGE, PORTS, ROLES, Stack

_LINES = 60
_STATUS_S = 60.0


def save_evidence(stack: Stack, cause: str) -> Path:
    """Write a file about the run as it is now, beside the run's folder."""
    parts = [f"{cause}\n{time.strftime('%F %T')}, step {stack.steps.last}"]
    parts += [f"{program}: {stack.read_health(program)}" for program in PORTS if program != "redis"]
    parts += [f"{role}: {[_describe(process) for process in stack.find(role)]}" for role in ROLES]
    for name in ("prompts", "trajectories"):
        with suppress(redis.RedisError):
            key = stack.key(name)
            parts.append(f"{name}: {stack.redis.xlen(key)} entries, {stack.redis.xpending(key, 'forage')}")
    parts.append(_read_status(stack))
    for file in (stack.run / "state.json", *sorted((stack.run / "logs").glob("*.log"))):
        with suppress(OSError):
            parts.append(f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-_LINES:]))
    folder = stack.folder / "evidence"
    folder.mkdir(exist_ok=True)
    target = folder / f"{int(time.time())}-{cause.replace(' ', '-')}.txt"
    target.write_text("\n\n".join(parts) + "\n")
    return target


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return json.dumps({"pid": process.pid, "status": process.status(), "cpu_s": sum(process.cpu_times()[:2])})
    return "gone"


def _read_status(stack: Stack) -> str:
    """What `forage status` says, with the stacks of silent processes where it can."""
    command = [*FORAGE, "status", "--config", str(stack.run / "settings.yaml")]
    try:
        ended = subprocess.run([*command, "--stacks"], capture_output=True, text=True, timeout=_STATUS_S)
        if ended.returncode == 2:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_STATUS_S)
    except subprocess.TimeoutExpired:
        return "forage status did not end"
    return ended.stdout + ended.stderr
