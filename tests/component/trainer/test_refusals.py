"""The trainer says which engines refuse its policy, with a real Redis server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from forage_proto.v1.trajectory_pb2 import Policy, Replica
from forage_queue.streams.client import StreamClient
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import RedisSettings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_weights.trainer.refusals import REFUSALS, REFUSING, Refusals

OLD, NEW = Policy(version=6, epoch=1), Policy(version=7, epoch=1, uri="/policies/v7")
REFUSES = Replica(serving=OLD, refused=NEW, reason="/policies/v7/model.safetensors has digest 12…: it is not served")


@pytest.fixture
def streams(redis_server: RedisSettings) -> StreamClient:
    client = StreamClient(redis_server, "run")
    client.publish(NEW)
    return client


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def make(streams: StreamClient, health: Health) -> Callable[[], Refusals]:
    return lambda: Refusals(streams, RedisRetry(Stop(), health), health)


def count_refusals() -> float:
    return next(sample.value for sample in REFUSALS.collect()[0].samples if sample.name.endswith("_total"))


def test_a_refusal_is_logged_and_counted_once_and_noted_for_as_long_as_it_lasts(
    streams: StreamClient, health: Health, make: Callable[[], Refusals]
) -> None:
    refusals, before = make(), count_refusals()
    streams.acknowledge_policy("other", Replica(serving=NEW))
    streams.acknowledge_policy("one", REFUSES)
    with capture_logs() as logs:
        for _ in range(3):
            refusals.check()
    assert [(entry["event"], entry["replica"]) for entry in logs] == [("policy_refused_by_engine", "one")]
    assert count_refusals() - before == 1
    assert REFUSING.collect()[0].samples[0].value == 1
    assert health.notes["policy"].startswith("1 of 2 engines refuse policy version 7: /policies/v7/model.safetensors")
    assert not refusals.is_to_be_published_again(), "the other one serves it"
    streams.acknowledge_policy("one", Replica(serving=NEW))
    refusals.check()
    assert health.notes == {}
    assert refusals.canary_diff is None, "no engine has compared"
    for name, difference in (("one", 2e-7), ("other", 3e-6)):
        streams.acknowledge_policy(name, Replica(serving=NEW, difference=difference))
    refusals.check()
    assert refusals.canary_diff == pytest.approx(3e-6)
    assert REFUSING.collect()[0].samples[0].value == 0


def test_a_refusal_of_an_earlier_policy_is_over(
    streams: StreamClient, health: Health, make: Callable[[], Refusals]
) -> None:
    streams.acknowledge_policy("one", REFUSES)
    streams.publish(Policy(version=8, epoch=1))
    make().check()
    assert health.notes == {}


def test_what_all_engines_refuse_is_published_again_once_and_the_note_says_what_to_do(
    streams: StreamClient, health: Health, make: Callable[[], Refusals]
) -> None:
    refusals = make()
    assert not refusals.is_to_be_published_again(), "there is no engine"
    for name in ("one", "other"):
        streams.acknowledge_policy(name, REFUSES)
    with capture_logs() as logs:
        assert refusals.is_to_be_published_again()
        again = Policy(version=7, epoch=1, uri="/policies/v7", published_unix_ms=5)
        streams.publish(again)
        assert not refusals.is_to_be_published_again(), "they have not tried it yet"
        for name in ("one", "other"):
            streams.acknowledge_policy(name, Replica(serving=OLD, refused=again, reason=REFUSES.reason))
        assert not refusals.is_to_be_published_again(), "once"
    assert [entry["event"] for entry in logs].count("policy_refused_by_all") == 1
    assert "all engines (2) refuse policy version 7: /policies/v7/model.safetensors" in health.notes["policy"]
    assert "see that every engine can read the named file" in health.notes["policy"]
