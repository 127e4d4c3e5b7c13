"""The trainer's spans: one begins a prompt's trace, a group's continue it, a step's links to its groups' traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from forage_proto.v1.trajectory_pb2 import Prompt, Purpose
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.tracing import SpanKind
from forage_runtime.text.enums import name_value
from forage_trajectory.trajectory import Group


@contextmanager
def trace_issue(prompt: Prompt) -> Iterator[None]:
    """Open the root span of a prompt's trace, to which every later span of the prompt and its group belongs."""
    attributes = _attributes(prompt) | {"forage.purpose": name_value(Purpose, prompt.purpose).lower()}
    with tracing.span("trainer.issue", attributes, kind=SpanKind.PRODUCER, parent="") as span:
        tracing.attach_trace_context(prompt, span)
        yield


def record_claim(group: Group) -> None:
    """Record that the group was claimed from its stream."""
    _record_event("trainer.claim", group, SpanKind.CONSUMER)


def record_drop(group: Group, reason: str) -> None:
    """Record that the group is not trained on."""
    _record_event("trainer.drop", group, SpanKind.INTERNAL, {"forage.reason": reason})


@contextmanager
def trace_step(number: int, groups: Sequence[Group], began_ns: int) -> Iterator[None]:
    """Trace an optimizer step: a trace of its own, and a span of the same length in the trace of each of its groups.

    Args:
        began_ns: when the wait for the groups began, in nanoseconds since 1970.
    """
    traced = [group for group in groups if group.traceparent]
    attributes = {"forage.step": number, "forage.groups": len(groups)}
    links = [group.traceparent for group in traced]
    with (
        tracing.span("trainer.step", attributes, parent="", links=links, began_ns=began_ns) as own,
        ExitStack() as open_,
    ):
        with tracing.span("trainer.wait", began_ns=began_ns):
            pass
        for group in traced:
            span = tracing.span(
                "trainer.train",
                _attributes(group) | {"forage.step": number},
                parent=group.traceparent,
                links=[tracing.traceparent(own)],
                active=False,
            )
            open_.enter_context(span)
        yield


def _record_event(name: str, group: Group, kind: SpanKind, more: tracing.Attributes | None = None) -> None:
    if group.traceparent:
        with tracing.span(name, {**_attributes(group), **(more or {})}, kind=kind, parent=group.traceparent):
            pass


def _attributes(entry: Prompt | Group) -> dict[str, str | int]:
    return {
        "forage.group": entry.group_uid,
        "forage.batch": entry.batch,
        "forage.position": entry.position,
        "forage.attempt": entry.attempt,
    }
