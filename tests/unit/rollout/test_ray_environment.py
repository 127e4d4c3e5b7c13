"""Ray is given more time to start than its own constant."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import _raylet
from ray._private import node, services

from forage_runtime import ray_environment as module
from forage_runtime.ray_environment import (
    LOOK_S,
    START_LIMIT_S,
    RayletEndedError,
    extend_start_limit,
    ray_environment,
)


@pytest.fixture
def late_node(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The look-up of Ray's own node, which is known only at the fifth call; records the times of the calls.

    The clock stands still but for sleeps.
    """
    calls: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def look_up(address: str, node: str) -> dict[str, str]:
        calls.append(now[0])
        if len(calls) < 5:
            raise RuntimeError(f"no node {node} at {address}")
        return {"node_id": node}

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(services, "get_node", look_up)
    return calls


def test_a_node_that_registers_late_is_waited_for(late_node: list[float], tmp_path: Path) -> None:
    with extend_start_limit(tmp_path):
        assert services.get_node("127.0.0.1:1", "n") == {"node_id": "n"}
    assert len(late_node) == 5
    late_node.clear()
    with pytest.raises(RuntimeError, match="no node n"):
        services.get_node("127.0.0.1:1", "n")


def test_a_node_that_never_registers_is_given_up(late_node: list[float], tmp_path: Path) -> None:
    with extend_start_limit(tmp_path, 0.15), pytest.raises(RuntimeError, match="no node n"):
        services.get_node("127.0.0.1:1", "n")
    assert late_node == [0.0, 0.1, 0.2], "it gives up at the first failure after its limit"


def test_a_raylet_that_has_ended_is_not_waited_for_and_its_last_line_is_the_reason(
    late_node: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "session_1/logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("\n")
    (logs / "raylet.out").write_text("begins\ncannot reach the GCS\n\n")
    monkeypatch.setattr(module, "has_raylet_ended", lambda: True)
    with (
        extend_start_limit(tmp_path),
        pytest.raises(RayletEndedError, match="ended before it was ready: cannot reach the"),
    ):
        services.get_node("127.0.0.1:1", "n")
    assert late_node == [0.0]


def test_the_installed_ray_has_the_constant_and_looks_its_node_up_where_it_is_extended() -> None:
    source = inspect.getsource(node.Node.__init__)
    assert "raylet_start_wait_time_s = 30" in source
    assert "ray._private.services.get_node(" in source


def test_the_installed_ray_knows_the_environment_variables_of_its_other_limits() -> None:
    known = Path(_raylet.__file__).read_bytes() + Path(str(node.__file__)).read_bytes()
    limits = {str(START_LIMIT_S), str(LOOK_S)}
    variables = [name for name, value in ray_environment().items() if value in limits]
    assert len(variables) == 3
    assert [name for name in variables if name.encode() not in known] == []
