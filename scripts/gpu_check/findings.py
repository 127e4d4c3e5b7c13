"""What a stage finds: checks against bounds, measurements, and what it lacks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forage_cli.local.home import find_interpreter
from forage_cli.local.nvidia import LocalGpu, find_cuda, list_gpus
from forage_cli.local.stack import Program
from forage_cli.planning.shapes import KNOWN

HERE = Path(__file__).resolve().parent


class SkipStage(Exception):
    """The machine lacks what the stage needs; the message says what, in a sentence."""


CUDA_USERS = (Program.ROLLOUT, Program.TRAINER)


def find_lacking(gpus: Sequence[LocalGpu]) -> str:
    """What keeps services from computing on GPUs, in a sentence; empty: nothing."""
    if not gpus:
        return "no GPU: nvidia-smi is missing or lists none"
    for program in CUDA_USERS:
        if not find_cuda(program):
            return f"the {program}'s packages are for CPUs: run 'make setup DEVICE=gpu'"
    return ""


class Findings:
    """The findings of one stage.

    model: the folder that the user gave; gpus: of this machine; lacking: see `find_lacking`.
    """

    def __init__(self, model: Path | None) -> None:
        self.model = model
        self.gpus = list_gpus()
        self.lacking = find_lacking(self.gpus)
        self._checks: dict[str, dict[str, Any]] = {}
        self._measured: dict[str, Any] = {}
        self._reason = ""
        self._is_skipped = False

    @property
    def has_gpu(self) -> bool:
        """Whether services compute on a GPU here."""
        return not self.lacking

    def check(
        self,
        name: str,
        value: float | str | bool,
        *,
        most: float | None = None,
        least: float | None = None,
        equal: float | str | bool | None = None,
    ) -> None:
        """Check a value against one bound; a number that is not one (NaN) fails."""
        if equal is not None:
            ok, bound = value == equal, f"= {equal}"
        elif most is not None:
            ok, bound = float(value) <= most, f"<= {most:g}"
        else:
            assert least is not None, "a check needs a bound"
            ok, bound = float(value) >= least, f">= {least:g}"
        self._checks[name] = {"value": _round(value), "bound": bound, "ok": bool(ok)}

    def measure(self, **values: Any) -> None:
        """Note what has no bound."""
        self._measured |= {name: _round(value) for name, value in values.items()}

    def skip(self, reason: str) -> None:
        """Note what the machine lacks; checks that were made before count."""
        self._reason, self._is_skipped = reason, True

    def leave_out(self, what: str) -> None:
        """Note what was not run, and what the machine lacks for it."""
        self._reason = f"{self.lacking}; {what}" if self.lacking else what

    def summarize(self) -> dict[str, Any]:
        failed = any(not check["ok"] for check in self._checks.values())
        status = "failed" if failed else "passed" if self._checks else "skipped"
        assert failed or self._checks or self._is_skipped, "a stage without a check shows nothing"
        part = {} if status == "skipped" else {"part": "GPU" if self.has_gpu else "CPU"}
        return {"status": status, "reason": self._reason, **part, "checks": self._checks, "measured": self._measured}


def call_worker(
    program: Program, script: str, arguments: Sequence[str | Path] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a script of workers/ in a service's environment; its last line of JSON is its reply.

    Raises:
        SkipStage: the environment is not installed.
        RuntimeError: the script failed.
    """
    interpreter = find_interpreter(program)
    if not interpreter.exists():
        raise SkipStage(f"the environment of {program} is missing: run 'make setup DEVICE=gpu'")
    variables = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [str(interpreter), str(HERE / "workers" / script), *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=variables | dict(environment or {}), encoding="utf-8"
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{script} ended with {done.returncode}: its messages are above")
    reply: dict[str, Any] = json.loads(lines[-1])
    print(f"{script} {' '.join(map(str, arguments))}: {lines[-1][:2000]}", file=sys.stderr)
    return reply


def make_model(folder: Path) -> None:
    """Write a model of the shape of Qwen2.5-0.5B with random weights."""
    shape = KNOWN["Qwen2.5-0.5B"]
    values = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.is_tied,
    }
    call_worker(Program.TRAINER, "make_model.py", [folder, json.dumps(values)])


def _round(value: Any) -> Any:
    """Numbers with six significant digits; what JSON has no number for (NaN) as a word."""
    if isinstance(value, bool) or not isinstance(value, float):
        return {name: _round(one) for name, one in value.items()} if isinstance(value, dict) else value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
