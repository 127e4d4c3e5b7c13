"""The trainer's spans: a prompt's begins its trace, a group's goes on with it, a step's links to those that it eats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from forage_common.telemetry import tracing
from forage_common.telemetry.tracing import SpanKind
from forage_common.v1.trajectory_pb2 import Prompt, Purpose, TrajectoryGroup


@contextmanager
def issuing(prompt: Prompt) -> Iterator[None]:
    """The root of a trace: all that becomes of the prompt belongs to it."""
    facts = _facts(prompt) | {"forage.purpose": Purpose.Name(prompt.purpose).removeprefix("PURPOSE_").lower()}
    with tracing.span("trainer.issue", facts, kind=SpanKind.PRODUCER, parent="") as span:
        tracing.attach_trace_context(prompt, span)
        yield


def taken(group: TrajectoryGroup) -> None:
    """The group has come from its stream."""
    _moment("trainer.take", group, SpanKind.CONSUMER)


def dropped(group: TrajectoryGroup, reason: str) -> None:
    """The group is not trained on."""
    _moment("trainer.drop", group, SpanKind.INTERNAL, {"forage.reason": reason})


@contextmanager
def step(number: int, groups: Sequence[TrajectoryGroup], began_ns: int) -> Iterator[None]:
    """An optimizer step: a trace of its own, and as long as it lasts a span in the trace of each group that it eats.

    Args:
        began_ns: when the wait for the groups began, in nanoseconds since 1970.
    """
    traced = [group for group in groups if group.traceparent]
    facts = {"forage.step": number, "forage.groups": len(groups)}
    links = [group.traceparent for group in traced]
    with tracing.span("trainer.step", facts, parent="", links=links, began_ns=began_ns) as own, ExitStack() as eaten:
        with tracing.span("trainer.wait", began_ns=began_ns):
            pass
        for group in traced:
            part = tracing.span(
                "trainer.train",
                _facts(group) | {"forage.step": number},
                parent=group.traceparent,
                links=[tracing.traceparent(own)],
                active=False,
            )
            eaten.enter_context(part)
        yield


def _moment(name: str, group: TrajectoryGroup, kind: SpanKind, facts: tracing.Attributes | None = None) -> None:
    if group.traceparent:
        with tracing.span(name, {**_facts(group), **(facts or {})}, kind=kind, parent=group.traceparent):
            pass


def _facts(entry: Prompt | TrajectoryGroup) -> dict[str, str | int]:
    return {
        "forage.group": entry.group_uid,
        "forage.batch": entry.batch,
        "forage.position": entry.position,
        "forage.attempt": entry.attempt,
    }
