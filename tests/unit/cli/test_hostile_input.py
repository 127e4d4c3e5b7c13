"""Whatever a command is given, it ends with a sentence and exit code 0, 1 or 2, never with a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hostile_cli import CONFIGS, Run, run

__all__ = ["run"]

OVERRIDES = [
    "run.id=[/x]",
    "[/x]=1",
    "run.id=\x1b[2J",
    "run.seed=" + "9" * 5000,
    "run.seed=1e400",
    "run.seed=0x" + "f" * 10_000,
    "run.id=" + "[" * 2_000,
    "rollout.temperature=.nan",
    "rollout.temperature=-.inf",
    "run.id=2024-99-99",
    "run.id=!!timestamp x",
    "run.dir=" + "a" * 100_000,
    'model.path="a\\0b"',
    "a." * 3000 + "b=1",
    "=1",
    ".=1",
    "..=",
    "run=1",
    "run.id",
    "redis.url=redis://[::1",
    "redis.url=redis+sentinel://a:99999999999/x",
    "redis.url=redis://h:99999999",
    "data.train_files=[[[]]]",
    "reward.routes={1: {name: 2}}",
    'reward.routes.x.name="\\ud800"',
    "rollout.http_address=h:99999",
]


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_settings_file_of_any_content(run: Run, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    run("config", "show", "--config", str(file))


@pytest.mark.parametrize("override", OVERRIDES, ids=range(len(OVERRIDES)))
def test_a_setting_of_any_value(run: Run, override: str) -> None:
    code, output = run("config", "show", override)
    if code:
        assert len(output) < 2000, "an error is a sentence"


@pytest.mark.parametrize("argument", ["a\udcffb", "a\0b"])
@pytest.mark.parametrize("path", [("trajectories",), ("ask",), ("config", "show"), ("eval", "report")], ids=" ".join)
def test_an_argument_that_is_no_text(run: Run, path: tuple[str, ...], argument: str) -> None:
    code, output = run(*path, argument)
    assert code == 2
    assert "argument" in output


def test_a_settings_file_that_may_not_be_read(run: Run, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (tmp_path / "bad.yaml").chmod(0)
    assert run("config", "show", "--config", "bad.yaml")[0] == 2
