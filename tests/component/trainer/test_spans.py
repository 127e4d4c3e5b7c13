"""The trainer's spans of prompts, groups and steps, as a real collector gets them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from arrived_groups import arrive
from otlp_receiver import Receiver, trace_process

from forage_proto.v1.trajectory_pb2 import Prompt, Purpose, TrajectoryGroup
from forage_queue.streams.prompt_identity import build_group
from forage_queue.trainer import spans
from forage_runtime.stop import Stop, Stopped
from forage_runtime.telemetry import tracing
from forage_trainer.step import Stopwatch
from forage_trajectory.trajectory import Group


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with trace_process("trainer") as otlp:
        yield otlp


def issue_group(position: int) -> Group:
    """A group that answers a prompt, as the trainer receives it."""
    prompt = Prompt(group_uid=f"g/{position}", batch=3, position=position, purpose=Purpose.PURPOSE_TRAIN)
    with spans.trace_issue(prompt):
        pass
    return arrive(build_group(prompt, []))


def test_a_step_is_a_trace_and_a_span_in_the_trace_of_each_of_its_groups(receiver: Receiver) -> None:
    groups = [issue_group(0), issue_group(1)]
    clock = Stopwatch()
    with spans.trace_step(3, [*groups, arrive(TrajectoryGroup(batch=3, position=2))], began_ns=0), clock("update"):
        pass
    tracing.stop()
    (step,) = receiver.named("trainer.step")
    assert step.attributes == {"forage.step": 3, "forage.groups": 3}
    assert {link for link, _ in step.links} == {group.traceparent[3:35] for group in groups}
    assert {span.name for span in receiver.spans if span.parent_id == step.span_id} == {
        "trainer.wait",
        "trainer.update",
    }
    assert step.trace_id not in {group.traceparent[3:35] for group in groups}
    trained = receiver.named("trainer.train")
    assert len(trained) == 2, "a group without a trace, issued before tracing was switched on, begins none"
    for group, span in zip(groups, sorted(trained, key=lambda span: span.attributes["forage.position"]), strict=True):
        (root,) = receiver.named("trainer.issue", span.trace_id)
        assert group.traceparent[3:35] == root.trace_id
        assert (root.parent_id, root.kind, root.attributes["forage.purpose"]) == ("", "producer", "train")
        assert span.parent_id == root.span_id
        assert span.links == ((step.trace_id, step.span_id),)
        assert span.attributes["forage.step"] == 3


def test_a_failed_step_marks_its_spans_as_failed(receiver: Receiver) -> None:
    with pytest.raises(ValueError, match="too large"), spans.trace_step(1, [issue_group(0)], began_ns=0):
        raise ValueError("the loss is too large")
    tracing.stop()
    failed = {span.name for span in receiver.spans if span.failed}
    assert failed == {"trainer.step", "trainer.train"}


def test_a_step_ended_by_a_stop_is_not_marked_as_failed(receiver: Receiver) -> None:
    stop = Stop()
    stop.request()
    with pytest.raises(Stopped), spans.trace_step(1, [issue_group(0)], began_ns=0), Stopwatch()("probe"):
        stop.check()
    tracing.stop()
    assert not [span for span in receiver.spans if span.failed]
    cancelled = {span.name for span in receiver.spans if span.events == ("cancelled",)}
    assert cancelled == {"trainer.step", "trainer.train", "trainer.probe"}


def test_a_claim_and_a_drop_of_a_group_are_recorded(receiver: Receiver) -> None:
    group = issue_group(0)
    spans.record_claim(group)
    spans.record_drop(group, "stale")
    spans.record_claim(arrive(TrajectoryGroup()))
    tracing.stop()
    result = {span.name: span for span in receiver.spans}
    assert set(result) == {"trainer.issue", "trainer.claim", "trainer.drop"}
    assert {span.trace_id for span in result.values()} == {group.traceparent[3:35]}
    assert result["trainer.drop"].attributes["forage.reason"] == "stale"


def test_without_tracing_a_prompt_has_no_trace_context() -> None:
    group = issue_group(0)
    assert group.traceparent == ""
    with spans.trace_step(1, [group], began_ns=0):
        pass
