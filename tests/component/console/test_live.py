"""What the console asks of the services of a run, which are real: health, explanations, replays; and its notes."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from console_client import ConsoleClient
from half_characters import write_spoiled
from step_runs import build_step_row, write_steps
from upath import UPath
from waiting import wait_until

from forage_console.live import health
from forage_console.live.health import inspect
from forage_console.live.inquiries import Inquiries
from forage_console.live.run_services import load_run_settings
from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.streams.client import StreamClient
from forage_runtime.clients import health as clients_health
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.health import ANSWER_S
from forage_runtime.settings import RedisSettings, Settings, load_settings
from forage_runtime.telemetry.health import Health, serve_health
from forage_runtime.telemetry.waits import waiting

ROW = "/runs/one/trajectories/step-10/0"
SECTIONS = ("reward", "retriever", "rollout", "trainer", "console")


@pytest.fixture
def settings(free_address: Callable[[], str], redis_server: RedisSettings, tmp_path: Path) -> dict[str, Any]:
    """A run's settings, some of which are of another version of Forage."""
    addresses = {f"{name}_address": free_address for name in ("grpc", "health", "http")}
    tree: dict[str, Any] = {
        section: {name: find() for name, find in addresses.items() if name in _list_addresses(section)}
        for section in SECTIONS
    }
    tree["trainer"]["a_setting_of_tomorrow"] = 1
    tree["reward"]["routes"] = {"nq": {"name": "search_r1_format"}}
    return tree | {"run": {"id": "one", "dir": str(tmp_path / "runs")}, "redis": {"url": redis_server.url}}


def _list_addresses(section: str) -> set[str]:
    return {name for name in type(getattr(Settings(), section)).model_fields if name.endswith("_address")}


@pytest.fixture
def run(settings: dict[str, Any], tmp_path: Path) -> Path:
    folder = tmp_path / "runs/one"
    (folder / "logs").mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("")
    write_steps(folder, [build_step_row(10), build_step_row(10, sample=1, reward=None)])
    return folder


@pytest.fixture
def announced(settings: dict[str, Any]) -> StreamClient:
    """The streams of the run, with a policy that one engine serves and another refuses."""
    client = StreamClient(RedisSettings(url=settings["redis"]["url"]), "one")
    client.create_groups()
    policy = Policy(version=7, uri="/policies/v7", epoch=client.acquire_epoch())
    client.publish(policy)
    client.acknowledge_policy("engine-a", Replica(serving=policy))
    client.acknowledge_policy("engine-b", Replica(refused=policy, reason="a file is missing", out_of_service=True))
    return client


@pytest.fixture
def ready(settings: dict[str, Any]) -> Iterator[Health]:
    """The health of a reward service that is ready and says something."""
    health = Health()
    server = serve_health(settings["reward"]["health_address"], health)
    health.mark_started()
    health.set_notes({"speed": "the judge is slow"})
    yield health
    server.shutdown()
    server.server_close()


def look(run: Path) -> dict[str, Any]:
    return inspect(UPath(run), Settings()).model_dump()


def test_the_health_of_a_run_says_what_its_services_say(run: Path, announced: StreamClient, ready: Health) -> None:
    (run / "logs/reward.log").write_text("".join(f"line {number}\n" for number in range(5000)))
    with waiting("gold", on="the retriever", limit_s=300, detail="nugget 7"):
        found = look(run)
    services = {row["name"]: row for row in found["services"]}
    assert found["is_reachable"]
    assert found["problem"] == "not ready: retriever, rollout"
    assert (found["version"], found["epoch"]) == (7, 1)
    assert services["reward"]["state"] == services["redis"]["state"] == "ready"
    assert services["retriever"]["state"] == "not running"
    assert services["reward"]["notes"] == ["the judge is slow"]
    (wait,) = [wait for wait in services["reward"]["waits"] if wait["what"] == "gold"]
    assert (wait["on"], wait["detail"], wait["is_idle"]) == ("the retriever", "nugget 7", False)
    assert 0 < wait["gives_up_in_s"] <= 300
    assert services["reward"]["log"] == [f"line {number}" for number in range(4980, 5000)]
    replicas = {row["name"]: row for row in found["replicas"]}
    assert replicas["engine-a"]["version"] == 7
    assert replicas["engine-b"]["is_out_of_service"]
    assert "a file is missing" in replicas["engine-b"]["text"]
    assert [queue["entries"] for queue in found["queues"]] == [0, 0]
    assert found["redis"]["used_bytes"] > 0


def test_services_that_serve_another_run_are_not_this_runs(run: Path, ready: Health) -> None:
    found = look(run)  # Redis answers, and knows nothing of it
    assert not found["is_reachable"]
    assert "have ended, or serve another run" in found["problem"]
    assert {row["state"] for row in found["services"]} == {"not running"}


def test_a_run_whose_supervisor_lives_is_shown_before_redis_answers(run: Path, ready: Health) -> None:
    (run / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getpid()}, "services": []}))
    assert look(run)["is_reachable"]


class LateServer:
    """A service that answers once it is let to, or begins an answer and never ends it."""

    def __init__(self, address: str, never_ends: bool = False) -> None:
        self.asked = 0
        self.may_answer = threading.Event()
        self._never_ends, self._is_closed = never_ends, False
        host, port = address.split(":")
        self._listener = socket.create_server((host, int(port)))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.asked += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(2**16)
            while not self.may_answer.wait(0.2):  # lint: short because it is the pause between two bytes
                if self._never_ends:  # a byte now and then: no read times out
                    connection.sendall(b"H")
            if self._is_closed:
                return
            body = b'{"waits": [], "notes": {}}'
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)

    def close(self) -> None:
        self._is_closed = True
        self.may_answer.set()
        self._listener.close()


@pytest.fixture
def now(run: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, by which a service is slow or silent, for looks that wait for nothing."""
    (run / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getpid()}, "services": []}))
    now = [0.0]
    monkeypatch.setattr(health, "LIMIT_S", 0.05)
    monkeypatch.setattr(health, "_HEALTH", Inquiries(lambda: now[0]))
    return now


def read_states(run: Path) -> dict[str, tuple[str, list[str]]]:
    return {row["name"]: (row["state"], row["notes"]) for row in look(run)["services"]}


def test_what_hangs_is_slow_until_it_is_silent_and_is_not_asked_twice(
    run: Path, settings: dict[str, Any], now: list[float]
) -> None:
    servers = {
        name: LateServer(settings[name]["health_address"], never_ends=name == "reward")
        for name in ("reward", "rollout", "trainer")
    }
    for passed_s, state in ((0.0, "slow"), (ANSWER_S - 0.5, "slow"), (ANSWER_S + 0.5, "silent")):
        now[0] = passed_s
        notes = [f"slow: no answer yet after {passed_s:.1f} s"] if state == "slow" else []
        states = read_states(run)
        assert [states[name] for name in servers] == [(state, notes)] * len(servers)
    for server in servers.values():
        assert server.asked <= 1
        server.close()


def test_what_answers_late_is_slow_and_says_how_late(
    run: Path, settings: dict[str, Any], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_health, "SLOW_S", 0.0)  # every answer takes longer
    server = LateServer(settings["trainer"]["health_address"])
    assert read_states(run)["trainer"][0] == "slow"
    now[0] = 3.2
    assert read_states(run)["trainer"] == ("slow", ["slow: no answer yet after 3.2 s"])
    server.may_answer.set()
    state, (note,) = wait_until(lambda: "yet" not in str(found := read_states(run)["trainer"]) and found)
    assert state == "slow"
    assert re.fullmatch(r"slow: answered after \d+\.\d s", note)
    server.close()


def test_a_late_redis_does_not_mean_that_the_services_are_gone(
    run: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LateServer(settings["reward"]["grpc_address"])
    settings["redis"]["url"] = f"redis://{settings['reward']['grpc_address']}/0"
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(health, "LIMIT_S", 0.05)
    assert look(run)["problem"] == "Redis has not answered yet whether the services are those of one"
    (run / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getpid()}, "services": []}))
    found = look(run)
    assert (found["is_reachable"], found["services"][0]["state"]) == (True, "slow")
    server.close()


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("rollout", "grpc_address", "10.1.2.3:18630"),
        ("reward", "health_address", "metadata.internal:80"),
        ("redis", "url", "redis://user:hunter2@10.1.2.3:6379/0"),
        ("redis", "url", "redis+sentinel://127.0.0.1:1,10.1.2.3:2/master"),
    ],
)
def test_a_folder_from_elsewhere_does_not_choose_whom_the_console_asks(
    run: Path, settings: dict[str, Any], section: str, name: str, value: str
) -> None:
    settings[section][name] = value
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(
        RefusedError, match=r"are elsewhere .*: start the console with the settings of the run"
    ) as error:
        load_run_settings(UPath(run), Settings())
    assert "hunter2" not in str(error.value)
    health = look(run)
    assert not health["is_reachable"]
    assert "are elsewhere" in health["problem"]
    own = load_settings(None, [f"{section}.{name}={value}"], {})
    assert getattr(getattr(load_run_settings(UPath(run), own), section), name) == value


def test_files_of_secrets_are_those_of_the_console(run: Path, settings: dict[str, Any]) -> None:
    settings["rollout"]["auth_token_file"] = "/home/someone/key"
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    own = load_settings(None, ["rollout.auth_token_file=/etc/token", "redis.password_file=/etc/password"], {})
    found = load_run_settings(UPath(run), own)
    assert (found.rollout.auth_token_file, found.redis.password_file) == (Path("/etc/token"), Path("/etc/password"))


def test_a_server_of_the_run_alone_is_asked_with_the_consoles_user(run: Path, settings: dict[str, Any]) -> None:
    file = run / "redis/passwords/forage-console"
    file.parent.mkdir(parents=True)
    file.write_text("word\n")
    settings["redis"] |= {"username": "forage-cli", "password_file": str(file.with_name("forage-cli"))}
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    for overrides in ([], ["redis.url=redis://127.0.0.1:1/0", "redis.password_file=/of/another/run"]):
        found = load_run_settings(UPath(run), load_settings(None, overrides, {})).redis
        assert (found.username, found.password_file) == ("forage-console", file)
    same = ["redis.username=me", "redis.password_file=/etc/password", f"redis.url={settings['redis']['url']}"]
    found = load_run_settings(UPath(run), load_settings(None, same, {})).redis
    assert (found.username, found.password_file) == ("me", Path("/etc/password"))


@pytest.mark.parametrize("text", ["", "[1]", "run: {id: [}", "run: {id: 'a b'}", "redis: {url: 7}", "\x00"])
def test_broken_settings_are_a_sentence(run: Path, text: str) -> None:
    (run / "settings.yaml").write_text(text)
    found = look(run)
    assert not found["is_reachable"]
    assert "\n" not in found["problem"]


def test_a_log_that_is_a_link_to_elsewhere_is_not_read(run: Path, announced: StreamClient) -> None:
    (run.parent / "secret").write_text("hunter2")
    (run / "logs/reward.log").symlink_to(run.parent / "secret")
    assert "hunter2" not in json.dumps(look(run))


def test_texts_with_half_a_character_are_answered(tmp_path: Path) -> None:
    client = ConsoleClient(write_spoiled(tmp_path / "runs/one").parent)
    for page in ("/runs/one/ask", "/runs/one/health"):
        assert client.ask(page).status_code == 200, page


def test_without_services_a_page_says_what_is_stored_and_what_to_do(run: Path) -> None:
    client = ConsoleClient(run.parent)
    explained = client.read(f"{ROW}/explanation")
    assert not explained["is_live"]
    assert "not running" in explained["text"]
    assert "adds +1" in explained["text"]
    for kind in ("score", "sample"):
        reply = client.send("POST", f"{ROW}/replay", {"kind": kind})
        assert reply.status_code == 503
        assert "'forage up'" in reply.json()["detail"]
    status = client.read("/runs/one/ask")
    assert (status["is_ready"], status["version"]) == (False, None)
    assert "'forage up'" in status["problem"]
    asked = client.send("POST", "/runs/one/ask", {"question": "Who?"})
    assert asked.status_code == 503
    assert asked.headers["content-type"] == "application/json", "it is refused before a stream begins"


def test_what_cannot_be_replayed_is_said(run: Path) -> None:
    client = ConsoleClient(run.parent)
    failed = client.send("POST", "/runs/one/trajectories/step-10/1/replay", {"kind": "shout"})
    assert failed.status_code == 422
    missing = client.send("POST", "/runs/one/trajectories/step-10/7/replay", {"kind": "score"})
    assert (missing.status_code, missing.json()["detail"]) == (
        404,
        "there is no trajectory 7 in step-10: it has 2, from 0",
    )


def test_the_running_reward_service_explains_and_scores_again(
    run: Path, settings: dict[str, Any], start_service: Callable[..., Any], wait_until_ready: Callable[..., None]
) -> None:
    own = settings["reward"]
    overrides = [f"reward.{name}_address={own[f'{name}_address']}" for name in ("grpc", "health")]
    process = start_service("reward", *overrides, "reward.routes={nq: {name: search_r1_format}}")
    wait_until_ready(process, own["health_address"])
    client = ConsoleClient(run.parent)
    explained = client.read(f"{ROW}/explanation")
    assert explained["is_live"]
    assert "score of made" in explained["text"], "the stored score is explained"
    reply = client.send("POST", f"{ROW}/replay", {"kind": "score"})
    assert reply.status_code == 200, reply.text
    result = reply.json()
    assert (result["stored"]["reward"], result["new"]["reward"]) == ("made", "search_r1_format")
    assert result["divergence"] == ""
    assert result["new"]["total"] != result["stored"]["total"]
    assert {part["name"] for part in result["changed"]} == {part["name"] for part in result["new"]["components"]}


def test_notes_are_kept_in_the_folder_of_the_run(run: Path) -> None:
    client = ConsoleClient(run.parent)
    notes = {"note": "better with <b>more</b> searches\n", "tags": ["paper", "paper", "ünïcode"]}
    written = client.send("PUT", "/runs/one/notes", notes)
    assert written.json() == notes | {"tags": ["paper", "ünïcode"]}
    assert json.loads((run / "notes.json").read_text()) == written.json()
    (row,) = client.read("/runs")["runs"]
    assert row["notes"] == written.json()


@pytest.mark.parametrize(
    "notes",
    [{"note": "x" * 10_001}, {"tags": ["a"] * 21}, {"tags": ["x" * 200]}, {"tags": [""]}, {"notes": "x"}, {"note": 1}],
    ids=lambda notes: next(iter(notes)),
)
def test_notes_have_limits(run: Path, notes: dict[str, Any]) -> None:
    reply = ConsoleClient(run.parent).send("PUT", "/runs/one/notes", notes)
    assert reply.status_code == 422
    assert not (run / "notes.json").exists()


def test_notes_do_not_follow_a_link_or_touch_what_else_is_there(run: Path) -> None:
    (run / "victim").write_text("precious")
    (run / "notes.json").symlink_to("victim")
    ConsoleClient(run.parent).send("PUT", "/runs/one/notes", {"note": "mine"})
    assert (run / "victim").read_text() == "precious"
    assert json.loads((run / "notes.json").read_text())["note"] == "mine"


def test_a_folder_that_cannot_be_written_is_said(run: Path) -> None:
    (run / "notes.json").mkdir()
    reply = ConsoleClient(run.parent).send("PUT", "/runs/one/notes", {"note": "mine"})
    assert reply.status_code == 409
    assert "cannot be written" in reply.json()["detail"]
