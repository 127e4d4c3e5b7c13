"""Checks of the trace of a group, for tests with a collector."""

from __future__ import annotations

from otlp_receiver import Received, Receiver

PARENTS = {
    "trainer.issue": "",
    "rollout.group": "trainer.issue",
    "rollout.run": "rollout.group",
    "rollout.sample": "rollout.run",
    "rollout.generate": "rollout.sample",
    "rollout.respond": "rollout.sample",
    "retriever.search": "rollout.respond",
    "POST /retrieve": "retriever.search",
    "retriever.index": "POST /retrieve",
    "reward.score": "rollout.run",
    "forage.v1.Reward/Score": "reward.score",
    "rollout.write": "rollout.group",
    "trainer.claim": "rollout.write",
    "trainer.train": "rollout.write",
}
"""Span → its parent."""

_OWN = {  # of spans that are not called after their service
    "retriever.search": "forage-rollout",
    "POST /retrieve": "forage-retriever",
    "reward.score": "forage-rollout",
    "forage.v1.Reward/Score": "forage-reward",
}


def find_spans(receiver: Receiver, trace_id: str) -> dict[str, list[Received]]:
    """Find the spans of a group's trace by name, and check the service and the parent of each."""
    spans = [span for span in list(receiver.spans) if span.trace_id == trace_id]
    by_id = {span.span_id: span for span in spans}
    by_name: dict[str, list[Received]] = {}
    for span in spans:
        parent = by_id.get(span.parent_id)
        assert span.name in PARENTS, f"{span.name} is no part of a group's trace"
        assert (parent.name if parent else "") == PARENTS[span.name], f"{span.name} has the wrong parent"
        assert span.service == _OWN.get(span.name, f"forage-{span.name.partition('.')[0]}")
        by_name.setdefault(span.name, []).append(span)
    return by_name
