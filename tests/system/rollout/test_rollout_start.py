"""The rollout service as a process that cannot start: one sentence and exit code 2."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from random_model import write_random_model
from rollout_parts import ADDRESSES, START_S, Services
from safetensors.torch import load_file
from waiting import WAIT_S


@pytest.fixture
def services(repository: Path, tmp_path: Path) -> Iterator[Services]:
    services = Services(repository, tmp_path)
    yield services
    services.end()


@pytest.fixture
def addresses(free_address: Callable[[], str]) -> dict[str, str]:
    return {f"{name}_address": free_address() for name in ADDRESSES}


def test_a_port_in_use_ends_with_one_sentence(
    services: Services,
    addresses: dict[str, str],
    repository: Path,
    tmp_path: Path,
) -> None:
    port = "rollout.grpc_address"
    host, _, number = addresses[port].rpartition(":")
    with socket.create_server((host, int(number))):
        overrides = [f"{name}={address}" for name, address in addresses.items()]
        service = services.start("rollout", f"model.path={repository}/models/tiny-policy", *overrides)
        assert service.wait(WAIT_S) == 2
    lines = (tmp_path / "rollout.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("forage rollout: ")] == lines[-1:]
    assert f"cannot listen on {addresses[port]}" in lines[-1]


START_FAULTS = {
    "a refused configuration": (
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"num_key_value_heads": 3},
        [],
        "AssertionError: num_heads (4) is not divisible by num_kv_heads (3)",
    ),
    "too little memory for one context": (
        {"hidden_size": 128, "num_hidden_layers": 32, "max_position_embeddings": 65536},
        {},
        ["rollout.engine.max_model_len=65536"],
        "ValueError: To serve at least one request with the model's max seq len (65536), (2.0 GiB KV cache is needed",
    ),
}
"""The model's sizes, what its configuration says besides, overrides, and how the reason begins."""


@pytest.mark.parametrize("fault", START_FAULTS)
def test_an_engine_that_cannot_start_ends_the_first_try_with_its_root_cause(
    fault: str, services: Services, addresses: dict[str, str], free_address: Callable[[], str], tmp_path: Path
) -> None:
    sizes, besides, overrides, reason = START_FAULTS[fault]
    model = write_random_model(tmp_path / "model", **sizes)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **besides}))
    own = [f"{name}={address}" for name, address in addresses.items()]
    lengths = ["rollout.max_prompt_length=256", "rollout.engine.max_model_len=512"]
    service = services.start(
        "rollout", f"model.path={model}", f"redis.url=redis://{free_address()}/0", *own, *lengths, *overrides
    )
    assert service.wait(START_S) == 4
    lines = (tmp_path / "rollout.log").read_text().splitlines()
    assert lines[-1].startswith(f"forage rollout: {reason}")
    assert lines[-1].endswith("(the Engine does not start)")
    events = [json.loads(line) for line in lines if line.startswith("{")]
    (failure,) = [event for event in events if event["event"] == "engine_not_started"]
    assert (failure["lasts"], failure["reason"] in lines[-1]) == (True, True)
    assert failure["exception"].count("Traceback (most recent call last)") >= 2  # of vLLM's process and of the replica


def test_a_tensor_file_that_is_missing_ends_with_one_sentence(services: Services, tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model")
    weights = dict.fromkeys(load_file(model / "model.safetensors"), "part-1.safetensors")
    (model / "model.safetensors").rename(model / "part-1.safetensors")
    weights |= dict.fromkeys(list(weights)[:2], "part-2.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    service = services.start("rollout", f"model.path={model}")
    assert service.wait(WAIT_S) == 2
    assert (tmp_path / "rollout.log").read_text() == (
        f"forage rollout: model.path {model} has no usable weights (part-2.safetensors: No such file or directory): "
        "set model.path to a complete Hugging Face folder\n"
    )


def test_a_missing_model_folder_ends_with_one_sentence(services: Services, tmp_path: Path) -> None:
    service = services.start("rollout", f"model.path={tmp_path}/missing")
    assert service.wait(WAIT_S) == 2
    assert (tmp_path / "rollout.log").read_text() == (
        f"forage rollout: model.path {tmp_path}/missing does not exist: "
        "set model.path to a complete Hugging Face folder\n"
    )
