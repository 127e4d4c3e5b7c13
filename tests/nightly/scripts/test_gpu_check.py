"""`make gpu-check`: what its lines say, and that a stage that hangs or fails leaves nothing behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpu_check import findings
from waiting import wait_until

from forage_cli.local.stack import Program

KIT = Path(__file__).resolve().parents[3] / "scripts/gpu_check"
STAGE = f"{KIT} --inside demo"
"""In the command of a process."""


def run_kit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KIT / "run", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_a_stage_that_takes_too_long_fails_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    done = run_kit("demo", "--limit-s", "4", "--out", out)
    line = json.loads(out.read_text())
    assert (done.returncode, line["stage"], line["status"]) == (1, "demo", "failed")
    assert line["reason"].startswith("longer than 4 s")
    assert all(line[name] for name in ("commit", "date", "device"))
    assert list_left(STAGE) == []


def list_left(words: str) -> list[str]:
    """The commands of processes that have these words."""
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [command for command in commands if words in command]


def test_a_kit_that_is_ended_ends_its_stage_and_no_second_one_starts_beside_it(tmp_path: Path) -> None:
    kit = subprocess.Popen([KIT / "run", "demo", "--out", tmp_path / "lines.jsonl"], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: list_left(STAGE), "the stage runs")
        second = run_kit("environment", "--out", tmp_path / "lines.jsonl")
        assert second.returncode == 2
        assert "another gpu-check runs" in second.stderr
    finally:
        kit.terminate()
        kit.wait(60)
    assert list_left(STAGE) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("updates",), "updates is not a stage, expected some of environment, update"),
        (("update", "--model", "/nowhere"), "--model /nowhere has no config.json"),
    ],
)
def test_a_wrong_argument_is_named(arguments: tuple[str, ...], sentence: str) -> None:
    done = run_kit(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_the_list_names_every_stage_with_what_it_shows() -> None:
    lines = run_kit("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "environment", "update", "engine", "search", "demo", "training", "colocated",
    ]  # fmt: skip
    assert all(len(line) > 40 for line in lines)


@pytest.mark.parametrize(
    ("bound", "value", "ok"),
    [
        ({"most": 1.0}, 1.0, True),
        ({"most": 1.0}, 1.0001, False),
        ({"most": 1.0}, math.nan, False),
        ({"least": 0.0}, -0.1, False),
        ({"least": 0.0}, math.nan, False),
        ({"equal": True}, True, True),
        ({"equal": 0}, 1, False),
    ],
)
def test_a_stage_passes_only_if_all_its_checks_do(bound: dict[str, Any], value: float, ok: bool) -> None:
    found = findings.Findings(None)
    found.check("first", 1, equal=1)
    found.check("second", value, **bound)
    summary = found.summarize()
    assert summary["checks"]["second"]["ok"] is ok
    assert summary["status"] == ("passed" if ok else "failed")
    found.measure(loss=value, deep={"rate": -math.inf})
    json.dumps(found.summarize(), allow_nan=False)  # a reader of lines is promised JSON


def test_a_stage_that_lacks_something_is_skipped_with_its_reason() -> None:
    found = findings.Findings(None)
    found.skip("no GPU")
    assert found.summarize() == {"status": "skipped", "reason": "no GPU", "checks": {}, "measured": {}}


def test_a_stage_without_checks_is_an_error() -> None:
    with pytest.raises(AssertionError, match="without a check"):
        findings.Findings(None).summarize()


def make_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi of two GPUs on the path."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor n in 0 1; do echo $n, GPU-$n, NVIDIA L4, 23034, 580.95.05, Disabled; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_what_keeps_services_from_gpus_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if not findings.list_gpus():
        assert findings.Findings(None).lacking == "no GPU: nvidia-smi is missing or lists none"
    make_driver(tmp_path, monkeypatch)
    monkeypatch.setattr(findings, "find_cuda", {Program.ROLLOUT: "13.0", Program.TRAINER: ""}.get)
    assert findings.Findings(None).lacking == "the trainer's packages are for CPUs: run 'make setup DEVICE=gpu'"
    monkeypatch.setattr(findings, "find_cuda", lambda program: "13.0")
    found = findings.Findings(None)
    assert (found.lacking, found.has_gpu, len(found.gpus)) == ("", True, 2)
