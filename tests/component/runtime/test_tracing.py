"""Spans, as a real collector gets them."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from typing import Any

import pytest
import structlog
from otlp_receiver import Received, Receiver, receive_grpc, receive_http
from waiting import WAIT_S, wait_until

from forage_proto.v1.trajectory_pb2 import Prompt
from forage_runtime.clients.calls import call
from forage_runtime.clients.circuit import Circuit
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import Settings, load_settings
from forage_runtime.telemetry import otlp, tracing
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.telemetry.trace_context import DROPPED
from forage_runtime.telemetry.tracing import SpanKind, span

ELSEWHERE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
UNSAMPLED = ELSEWHERE[:-2] + "00"


def build_settings(endpoint: str, *more: str) -> Settings:
    where = [f"tracing.endpoint={endpoint}"] if endpoint else []
    return load_settings(overrides=["tracing.enabled=true", "run.id=r1", *where, *more], environ={})


@pytest.fixture(autouse=True)
def soon_and_off_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield
    tracing.stop()
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receive_grpc() as otlp:
        tracing.start(build_settings(otlp.endpoint), "test")
        yield otlp
        tracing.stop()


def is_sampled(traceparent: str) -> bool:
    return int(traceparent[-2:], 16) & 1 == 1


def count_dropped() -> dict[str, float]:
    return {reason: DROPPED.labels(reason)._value.get() for reason in ("queue", "export")}


def test_while_tracing_is_off_the_sdk_is_not_imported_and_spans_do_nothing() -> None:
    code = """
import sys
from forage_runtime.telemetry import tracing
from forage_runtime.settings import Settings
from forage_proto.v1.trajectory_pb2 import Prompt
tracing.start(Settings(), "test")
prompt = Prompt()
with tracing.span("a", {"b": 1}, parent="", links=["x"]) as span:
    span.set_attributes({"c": 2}); span.add_event("d"); tracing.mark_failed(span, "e")
    tracing.attach_trace_context(prompt, span)
    assert tracing.trace_headers() == {} and tracing.trace_metadata() == ()
assert prompt == Prompt()
tracing.stop()
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("protocol", "make"), [("grpc", receive_grpc), ("http", receive_http)])
def test_spans_are_exported_with_their_resource_parents_attributes_and_links(
    protocol: str, make: Callable[[], Any]
) -> None:
    with make() as receiver:
        tracing.start(build_settings(receiver.endpoint, f"tracing.protocol={protocol}"), "test")
        with span("outer", {"forage.a": 1, "forage.b": "x"}, kind=SpanKind.SERVER) as outer:
            with span("inner", links=[ELSEWHERE, ""]) as inner:
                inner.add_event("happened")
                inner.set_attributes({"forage.c": 0.5, "forage.d": True})
            tracing.mark_failed(outer, "it did not go well")
        tracing.stop()
        first, second = receiver.spans
    assert (first.name, second.name) == ("inner", "outer")
    assert (first.trace_id, first.parent_id) == (second.trace_id, second.span_id)
    assert second.parent_id == ""
    assert tracing.traceparent(outer).startswith(f"00-{second.trace_id}-{second.span_id}-")
    assert is_sampled(tracing.traceparent(outer))
    assert tracing.traceparent(outer)[3:35] == second.trace_id
    assert first.attributes == {"forage.c": 0.5, "forage.d": True}
    assert second.attributes == {"forage.a": 1, "forage.b": "x"}
    assert first.links == (("0123456789abcdef0123456789abcdef", "0123456789abcdef"),)
    assert first.events == ("happened",)
    assert (first.kind, second.kind) == ("internal", "server")
    assert (first.failed, second.failed, second.detail) == (False, True, "it did not go well")
    sender = receiver.resources["forage-test"]
    assert sender["service.namespace"] == "forage"
    assert sender["forage.run"] == "r1"
    assert {"service.version", "service.instance.id"} <= set(sender)


def test_environment_variables_of_opentelemetry_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with receive_grpc() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        tracing.start(build_settings(""), "test")
        with span("one"):
            pass
        tracing.stop()
        assert [found.service for found in receiver.spans] == ["mine"]
        assert receiver.headers["x-token"] == "abc"
        assert receiver.resources["mine"]["deployment.environment.name"] == "lab"


@pytest.mark.parametrize(
    ("parent", "trace", "above"),
    [(ELSEWHERE, ELSEWHERE[3:35], ELSEWHERE[36:52]), ("", None, ""), ("nonsense", None, "")],
)
def test_a_remote_parent_is_a_traceparent_and_an_invalid_one_starts_a_trace(
    receiver: Receiver, parent: str, trace: str | None, above: str
) -> None:
    with span("outer"), span("called", parent=parent) as called:
        assert tracing.trace_headers() == {"traceparent": tracing.traceparent(called)}
        assert tracing.trace_metadata() == (("traceparent", tracing.traceparent(called)),)
    found, outer = receiver.wait_for(lambda r: len(r.spans) == 2 and r.spans)
    assert found.parent_id == above
    assert found.trace_id != outer.trace_id
    assert trace in (None, found.trace_id)


def test_an_exception_marks_the_span_as_failed_and_a_cancellation_does_not(receiver: Receiver) -> None:
    with suppress(ValueError), span("wrong"):
        raise ValueError("too short")

    async def wait() -> None:
        with span("waits"):
            await asyncio.Event().wait()

    async def cancel_task() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel_task())
    wrong, waits = receiver.wait_for(lambda r: len(r.spans) == 2 and r.spans)
    assert (wrong.failed, wrong.detail, wrong.events) == (True, "ValueError: too short", ("exception",))
    assert (waits.failed, waits.events) == (False, ("cancelled",))


def test_inactive_spans_are_not_parents(receiver: Receiver) -> None:
    with span("first", active=False), span("second", active=False):
        assert tracing.traceparent(tracing.current_span()) == ""
    found = receiver.wait_for(lambda r: len(r.spans) == 2 and r.spans)
    assert [one.parent_id for one in found] == ["", ""]


def test_a_span_can_have_an_earlier_start(receiver: Receiver) -> None:
    with span("late", began_ns=time.time_ns() - 3 * 10**9):
        pass
    (found,) = receiver.wait_for(lambda r: r.spans)
    assert found.seconds >= 3


def test_trace_context_is_attached_to_a_prompt() -> None:
    with receive_grpc() as receiver:
        tracing.start(build_settings(receiver.endpoint, "tracing.sample_ratio=0"), "test")
        prompt = Prompt()
        with span("root", parent="") as root:
            tracing.attach_trace_context(prompt, root)
        assert prompt.trace_id == tracing.traceparent(root)[3:35]
        assert prompt.traceparent == tracing.traceparent(root)
        assert not is_sampled(prompt.traceparent), "the flag is passed on as unsampled, too"


@pytest.mark.parametrize(
    ("ratio", "parent", "link", "sampled"),
    [
        (1.0, "", "", True),
        (0.0, "", "", False),
        (0.0, ELSEWHERE, "", True),
        (1.0, UNSAMPLED, "", False),
        (0.0, "", ELSEWHERE, True),
        (0.0, "", UNSAMPLED, False),
    ],
)
def test_the_root_of_a_trace_decides_whether_it_is_sampled(ratio: float, parent: str, link: str, sampled: bool) -> None:
    with receive_grpc() as receiver:
        tracing.start(build_settings(receiver.endpoint, f"tracing.sample_ratio={ratio}"), "test")
        with span("one", parent=parent, links=[link]):
            pass
        tracing.stop()
        assert [found.name for found in receiver.spans] == ["one"] * sampled


def test_the_sampling_ratio_is_respected() -> None:
    with receive_grpc() as receiver:
        tracing.start(build_settings(receiver.endpoint, "tracing.sample_ratio=0.25"), "test")
        for _ in range(1000):
            with span("one"), span("two"):
                pass
        tracing.stop()
        assert 150 < len(receiver.named("one")) < 350
        assert {one.trace_id for one in receiver.named("one")} == {two.trace_id for two in receiver.named("two")}


def test_an_unavailable_collector_is_logged_once_delays_nothing_and_its_lost_spans_are_counted(
    free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    address, before = free_address(), count_dropped()
    log = io.StringIO()
    with redirect_stderr(log):
        structlog.reset_defaults()
        configure_logs("test")
        tracing.start(build_settings(f"http://{address}"), "test")
        for _ in range(3):
            lost = count_dropped()["export"]
            with span("lost"):
                pass
            wait_until(lambda lost=lost: count_dropped()["export"] > lost)
        with receive_grpc(address) as receiver:

            def send_one() -> list[Received]:
                with span("found"):
                    pass
                return receiver.named("found")

            wait_until(send_one)
            tracing.stop()
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["collector_unavailable", "collector_available"]
    assert lines[0]["level"] == "warning"
    assert count_dropped()["export"] >= before["export"] + 3


def test_neither_spans_nor_the_shutdown_wait_for_a_hanging_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "STOP_S", 0.1)
    asked, released = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        asked.set()
        released.wait()

    with receive_grpc() as receiver:
        monkeypatch.setattr(receiver, "take", hang)
        tracing.start(build_settings(receiver.endpoint), "test")
        with span("one"):
            pass
        assert asked.wait(WAIT_S)
        with span("two"):
            pass
        tracing.stop()
        released.set()  # only now


def test_spans_beyond_the_queue_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    before = count_dropped()["queue"]
    released = threading.Event()
    with receive_grpc() as receiver:
        monkeypatch.setattr(receiver, "take", lambda *_: released.wait(WAIT_S))
        tracing.start(build_settings(receiver.endpoint), "test")
        for _ in range(40):
            with span("one"):
                pass
        released.set()
        tracing.stop()
    assert 20 <= count_dropped()["queue"] - before <= 30


def test_retries_of_a_call_are_events_of_the_active_span(receiver: Receiver) -> None:
    attempts = iter([TimeoutError("no answer"), TimeoutError("no answer"), None])

    async def run_attempt(_: float) -> str:
        if (error := next(attempts)) is not None:
            raise error
        return "done"

    async def run() -> None:
        with span("client"):
            assert await call(Circuit("retriever", "here"), run_attempt, 300) == "done"
        with suppress(UnavailableError), span("client"):
            await call(Circuit("retriever", "here"), fail_once, 0.05)

    async def fail_once(_: float) -> str:
        raise TimeoutError("no answer")

    asyncio.run(run())
    retried, given_up = receiver.wait_for(lambda r: len(r.spans) == 2 and r.spans)
    assert (retried.events, retried.failed) == (("retry", "retry"), False)
    assert given_up.failed
    assert given_up.detail.startswith("UnavailableError: the retriever at here gave no answer")


def test_log_lines_within_a_span_carry_its_ids(receiver: Receiver) -> None:
    log = io.StringIO()
    with redirect_stderr(log):
        structlog.reset_defaults()
        configure_logs("test")
        with span("work") as active:
            structlog.get_logger().info("inside")
        structlog.get_logger().info("outside")
    inside, outside = (json.loads(line) for line in log.getvalue().splitlines())
    assert tracing.traceparent(active).startswith(f"00-{inside['trace_id']}-{inside['span_id']}-")
    assert "trace_id" not in outside


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("tracing.endpoint=collector:4317", "tracing.endpoint"),
        ("tracing.sample_ratio=2", "tracing.sample_ratio"),
        ("tracing.protocol=udp", "tracing.protocol"),
        ("tracing.enable=true", "did you mean 'tracing.enabled'"),
    ],
)
def test_an_invalid_tracing_setting_is_named(override: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load_settings(overrides=[override], environ={})
