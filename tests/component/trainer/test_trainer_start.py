"""Wrong input ends the process before the engine is built: exit code 2, one sentence with the cause and the remedy."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import redis
from reward_routes import serve_routes
from trainer_parts import write_model, write_questions
from waiting import WAIT_S, wait_until

from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import RedisSettings, load_settings
from forage_runtime.stop import Stop
from forage_trainer.run import EXIT_STOPPED, run_leader


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    write_model(folder / "model")
    write_questions(folder / "train.parquet", 4)
    return folder


@pytest.fixture
def overrides(parts: Path, tmp_path: Path, free_address: Callable[[], str]) -> list[str]:
    return [
        f"run.dir={tmp_path / 'runs'}",
        f"model.path={parts / 'model'}",
        f"data.train_files=[{parts / 'train.parquet'}]",
        f"data.val_files=[{parts / 'train.parquet'}]",
        "data.train_batch_size=2",
        "trainer.actor.ppo_mini_batch_size=2",
        "trainer.algorithm.adv_estimator=gae",
        f"trainer.health_address={free_address()}",
    ]


def start(overrides: list[str]) -> int:
    return run_leader(load_settings(None, overrides, {}), Stop())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=/nowhere/model", ["model.path /nowhere/model does not exist", "Hugging Face folder"]),
        ("model.path={parts}", ["has no readable config.json", "Hugging Face folder"]),
        ("data.train_files=[/nowhere/a.parquet]", ["/nowhere/a.parquet does not exist", "Parquet"]),
        ("data.val_files=[{parts}/model/config.json]", ["config.json cannot be read as Parquet"]),
        ("data.train_batch_size=6", ["4 usable questions", "train_batch_size = 6"]),
        ("data.train_batch_size=3", ["ppo_mini_batch_size = 2 must divide", "train_batch_size = 3"]),
        ("rollout.temperature=0", ["rollout.temperature = 0.0 cannot be trained on", "set rollout.temperature=1.0"]),
        ("rollout.temperature=0.009", ["rollout.temperature = 0.009 cannot be trained on"]),
        ("rollout.top_p=0.9", ["rollout.top_p = 0.9 cannot be trained on", "set rollout.top_p=1.0"]),
        ("rollout.top_k=50", ["rollout.top_k = 50 cannot be trained on", "set rollout.top_k=-1"]),
        ("rollout.n=1 trainer.algorithm.adv_estimator=grpo", ["rollout.n must be at least 2", "grpo compares"]),
        ("rollout.engine.max_lora_rank=8", ["trainer.lora.lora_rank = 0", "adapters of rank 1 to 8 alone"]),
        ("trainer.critic.path=/nowhere", ["trainer.critic.path /nowhere has no config.json"]),
        (
            "rollout.max_start_length=2048 rollout.max_turns=15 rollout.max_response_length=500 "
            "rollout.max_obs_length=500",
            ["may have 17548 tokens", "16 generations of 500", "trainer.actor.ppo_max_token_len_per_gpu = 8192"],
        ),
        (
            "trainer.actor.ppo_max_token_len_per_gpu=1000",
            ["may have 1088 tokens", "trainer.actor.ppo_max_token_len_per_gpu = 1000"],
        ),
        ("trainer.total_steps=3", ["unknown setting 'trainer.total_steps'"]),
    ],
)
def test_wrong_input_is_named(
    overrides: list[str], parts: Path, tmp_path: Path, override: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        start([*overrides, *override.format(parts=parts).split()])
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("train", "validation"), [("unknown", "world_facts"), ("world_facts", "shadowed")])
def test_a_data_source_without_a_reward_is_refused_by_what_the_service_serves(
    overrides: list[str], tmp_path: Path, free_address: Callable[[], str], train: str, validation: str
) -> None:
    address, files = free_address(), {"train": train, "val": validation}
    for name, source in files.items():
        overrides.append(f"data.{name}_files=[{write_questions(tmp_path / f'{name}.parquet', 4, source=source)}]")
    # The trainer's own settings route it: what counts is what the service was started with.
    overrides += [
        f"reward.grpc_address={address}",
        f"reward.routes={{{train}: {{name: em}}, {validation}: {{name: em}}}}",
    ]
    with serve_routes(address, "world_facts"), pytest.raises(UserError) as error:
        start(overrides)
    name, source = next((name, source) for name, source in files.items() if source != "world_facts")
    assert f"data source '{source}' of data.{name}_files has no reward" in str(error.value)
    assert f"the reward service at {address} has routes for world_facts" in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_the_trainer_waits_for_the_reward_service_and_says_so(
    overrides: list[str], free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_runtime.clients.reward._DESCRIBE_S", 0.2)  # nobody answers within it
    address, health = free_address(), free_address()
    overrides += [f"reward.grpc_address={address}", f"trainer.health_address={health}"]
    stop, codes = Stop(), []
    settings = load_settings(None, overrides, {})
    leader = threading.Thread(target=lambda: codes.append(run_leader(settings, stop)))
    leader.start()
    try:
        assert "gave no answer" in wait_for_reason(health, "reward")
    finally:
        stop.request()
        leader.join(WAIT_S)
    assert codes == [EXIT_STOPPED]


def test_a_service_that_comes_up_late_is_asked(overrides: list[str], free_address: Callable[[], str]) -> None:
    address, health = free_address(), free_address()
    overrides += [f"reward.grpc_address={address}", f"trainer.health_address={health}"]
    errors = []

    def run() -> None:
        try:
            start(overrides)
        except UserError as error:
            errors.append(str(error))

    leader = threading.Thread(target=run)
    leader.start()
    wait_for_reason(health, "reward")
    with serve_routes(address, "other"):
        leader.join(WAIT_S)
    assert len(errors) == 1
    assert "has routes for other" in errors[0]


def test_a_redis_that_can_lose_groups_is_refused(
    overrides: list[str], tmp_path: Path, redis_server: RedisSettings, free_address: Callable[[], str]
) -> None:
    server, address = redis.Redis.from_url(redis_server.url), free_address()
    overrides += [f"redis.url={redis_server.url}", f"reward.grpc_address={address}"]
    server.config_set("appendfsync", "everysec")
    try:
        with serve_routes(address, "world_facts"), pytest.raises(SettingsError, match="set appendfsync always"):
            start(overrides)
    finally:
        server.config_set("appendfsync", "always")


def test_another_service_at_the_address_is_named(overrides: list[str], free_address: Callable[[], str]) -> None:
    address = free_address()
    other = grpc.server(ThreadPoolExecutor(1))
    assert other.add_insecure_port(address)
    other.start()
    try:
        with pytest.raises(UserError, match=f"{address} answers, but not as a reward service \\(UNIMPLEMENTED\\)"):
            start([*overrides, f"reward.grpc_address={address}"])
    finally:
        other.stop(None).wait()


def wait_for_reason(address: str, what: str) -> str:
    """Poll the health endpoint until it waits for `what`; returns what it says."""

    def ask() -> str:
        try:
            urllib.request.urlopen(f"http://{address}/readyz", timeout=WAIT_S).close()
        except urllib.error.HTTPError as error:
            waiting: dict[str, str] = json.load(error)["waiting_for"]
            return waiting.get(what, "")
        except OSError:
            pass
        return ""

    return wait_until(ask, f"a wait for {what} on the health endpoint")


def test_a_port_in_use_is_named(overrides: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"cannot listen on {address}"):
            start([*overrides, f"trainer.health_address={address}"])


def test_the_process_ends_with_exit_code_2_and_one_sentence(overrides: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forage_trainer", *overrides, "model.path=/nowhere/model"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    sentence = ended.stderr.strip().splitlines()[-1]
    assert sentence.startswith("forage trainer: ")
    assert "model.path /nowhere/model does not exist" in sentence
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()
