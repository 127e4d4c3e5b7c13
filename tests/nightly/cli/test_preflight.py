"""The checks of environments and of sampling, in the environment of the rollout service."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_cli.local import preflight
from forage_runtime.errors import UserError
from forage_runtime.settings import EnvironmentRoute, RolloutSettings, Settings


def load_from_environment(path: Path, **params: str) -> Settings:
    route = EnvironmentRoute(path=path, params=dict(params))
    return Settings(rollout=RolloutSettings(environments={"kg": route}))


def test_an_environment_that_cannot_be_loaded_is_named_with_its_data_source(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight.check_environments(Settings())
    # what the shell says was resolved before, and does not count again
    monkeypatch.setenv("FORAGE__ROLLOUT__ENVIRONMENTS", "{kg: {name: nonsense}}")
    preflight.check_environments(load_from_environment(repository / "examples/knowledge_graph/environment.py"))
    file = tmp_path / "own.py"
    file.write_text("import nowhere")
    with pytest.raises(UserError) as error:
        preflight.check_environments(load_from_environment(file))
    expected = "ModuleNotFoundError: No module named 'nowhere'"
    assert str(error.value) == f"rollout.environments.kg ({file}): {expected}"


def test_a_sampling_that_vllm_refuses_is_named_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORAGE__ROLLOUT__TEMPERATURE", "7")
    monkeypatch.setenv("PYTHONWARNDEFAULTENCODING", "1")  # libraries warn then, and are not heard
    preflight.check_sampling(Settings())
    preflight.check_sampling(Settings(rollout=RolloutSettings(temperature=1.5)))
    with pytest.raises(UserError) as error:
        preflight.check_sampling(Settings(rollout=RolloutSettings(temperature=3)))
    assert str(error.value) == (
        "rollout.temperature = 3.0: vLLM cannot sample so for training (temperature must be in [0, 2], got 3.0): "
        "set rollout.temperature to what vLLM takes"
    )
