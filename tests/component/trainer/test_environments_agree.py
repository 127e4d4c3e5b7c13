"""The trainer trains on nothing that was sampled in another environment than its settings want."""

from __future__ import annotations

import pytest
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import GroundTruth
from forage_queue.streams.client import StreamClient
from forage_records.questions import Question, Questions
from forage_runtime.errors import UserError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import RedisSettings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.data.routes import EnvironmentCheck

OWN = "rollout.environments={kg: {name: /here/graph.py:Graph, params: {depth: 2}}}"


def build_check(redis: RedisSettings, *overrides: str, source: str = "kg") -> tuple[EnvironmentCheck, StreamClient]:
    settings = load_settings(None, [f"redis.url={redis.url}", "run.id=test", *overrides], {})
    streams, stop = StreamClient(settings.redis, "test", WAIT_S), Stop()
    rows = (Question(source, "train", 0, (), GroundTruth(), "?"),)
    return EnvironmentCheck(settings, streams, [Questions(rows, "")], RedisRetry(stop, Health()), stop), streams


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forage_trainer.data.routes._PAUSE_S", 0.02)


def names(*overrides: str) -> dict[str, str]:
    return load_settings(None, list(overrides), {}).rollout.environment_names


def test_the_same_environments_pass_wherever_their_files_lie(redis_server: RedisSettings) -> None:
    check, streams = build_check(redis_server, OWN)
    check()  # no rollout service runs yet: the trainer does not wait for one
    streams.declare_environments(names(OWN.replace("/here", "/there")))
    check()


@pytest.mark.parametrize(
    ("wanted", "served", "sentence"),
    [
        ((OWN,), (), r"'kg' gets the environment 'search' from the rollout service, .* want 'graph.py:Graph"),
        ((), (OWN,), r"'kg' gets the environment 'graph.py:Graph .*want 'search': .* same rollout.environments.kg"),
        ((OWN,), (OWN.replace("2", "3"),), r"Graph \(parameters \w+\)' from .* want 'graph.py:Graph \(parameters"),
    ],
)
def test_another_environment_is_refused_by_name(
    redis_server: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
    wanted: tuple[str, ...],
    served: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.setattr("forage_trainer.data.routes._PATIENCE_S", 0.1)
    check, streams = build_check(redis_server, *wanted)
    streams.declare_environments(names(*served))
    with pytest.raises(UserError, match=sentence):
        check()


def test_what_no_question_needs_may_differ(redis_server: RedisSettings) -> None:
    check, streams = build_check(redis_server, OWN, source="facts")
    streams.declare_environments({})
    check()


def test_a_rollout_service_that_ended_a_moment_ago_is_not_held_against_its_successor(
    redis_server: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_trainer.data.routes._PATIENCE_S", 3600.0)
    check, streams = build_check(redis_server, OWN)
    streams.declare_environments({})
    assert 0 < streams._redis.ttl(streams.key("environments")) <= 15, "it is forgotten by itself, too"
    read, reads = streams.read_environments, []

    def declare_before_the_third() -> dict[str, str] | None:
        reads.append(1)
        streams.declare_environments(names(OWN) if len(reads) > 2 else {})
        return read()

    monkeypatch.setattr(streams, "read_environments", declare_before_the_third)
    check()
    assert len(reads) == 3
