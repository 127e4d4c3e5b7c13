"""GPUs of engine replicas: how many are asked of Ray, and what is refused before anything waits for ever."""

from __future__ import annotations

import json

import pytest

from forage_rollout.deployments import devices
from forage_rollout.deployments.application import build_application
from forage_runtime import devices as common
from forage_runtime.errors import UserError
from forage_runtime.settings import RolloutSettings, load_settings


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it is installed for GPUs; there is none here."""
    for module in (common, devices):
        monkeypatch.setattr(module, "find_cuda_version", lambda *_: "13.0")


def build(*overrides: str) -> RolloutSettings:
    return load_settings(None, [f"rollout.{one}" for one in overrides], {}).rollout


def test_an_engine_on_cpus_asks_for_no_gpu() -> None:
    assert devices.count_gpus(build("engine.tensor_parallel_size=2")) == 0
    with pytest.raises(UserError, match=r"rollout.device is gpu, and the installed PyTorch was built for CPUs"):
        devices.count_gpus(build("device=gpu"))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([], 1),
        (["engine.tensor_parallel_size=4"], 4),
        (["device=gpu", "engine.tensor_parallel_size=2"], 2),
        (["engine.endpoint=http://127.0.0.1:1/v1", "engine.tensor_parallel_size=4"], 0),
        (["engine.endpoint=http://127.0.0.1:1/v1", "device=cpu"], 0),
    ],
)
def test_the_gpus_of_a_replica_come_from_the_settings(overrides: list[str], gpus: int) -> None:
    assert devices.count_gpus(build(*overrides)) == gpus


@pytest.mark.usefixtures("cuda")
def test_the_application_asks_for_gpus_before_ray_has_any() -> None:
    """Nothing is connected to a Ray here, and the application is built all the same."""
    settings = load_settings(None, ["rollout.engine.tensor_parallel_size=2"], {})
    application = build_application(settings)
    found = {}
    todo = [application._bound_deployment]
    while todo:
        one = todo.pop()
        found[one.name] = one.ray_actor_options["num_gpus"]
        todo += [argument._bound_deployment for argument in one.init_args if hasattr(argument, "_bound_deployment")]
    assert found == {"Dispatcher": 0, "Agent": 0, "Engine": 2}, json.dumps(found)


@pytest.mark.usefixtures("cuda")
def test_vllm_for_gpus_does_not_compute_on_cpus() -> None:
    with pytest.raises(UserError, match=r"rollout.device is cpu, .*13.0.*'make setup DEVICE=cpu'.*device=auto"):
        devices.count_gpus(build("device=cpu"))


@pytest.mark.usefixtures("cuda")
def test_a_machine_without_enough_gpus_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    rollout = build("engine.tensor_parallel_size=2", "engine_replicas={min: 2, max: 3}")
    devices.check_machine(rollout, 4)
    with pytest.raises(UserError, match=r"min=2 with .*tensor_parallel_size=2 need 4 GPUs, .* shows 2 .*'0,1'"):
        devices.check_machine(rollout, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"CUDA 13.0, .* shows no GPU \(CUDA_VISIBLE_DEVICES=''\): .* DEVICE=cpu'"):
        devices.check_machine(rollout, 0)


@pytest.mark.usefixtures("cuda")
def test_tensor_parallelism_over_several_nodes_is_refused_and_later_nodes_are_waited_for() -> None:
    rollout = build("engine.tensor_parallel_size=8", "engine_replicas={min: 2, max: 2}")
    devices.check_nodes(rollout, [0, 0])
    devices.check_nodes(rollout, [0, 8])
    with pytest.raises(UserError, match=r"tensor_parallel_size is 8, .* largest .* has 4 GPU\(s\): .* one node"):
        devices.check_nodes(rollout, [0, 4, 4])
    assert devices.describe_shortage(rollout, [0, 8]) == "16 GPU(s) for 2 engine(s): Ray's 2 node(s) have 8"
    assert devices.describe_shortage(rollout, [0, 8, 8]) == ""
