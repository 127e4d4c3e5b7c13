"""Histories made by hand: operations in the order in which they happened, written as the files of their processes."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

BATCH_SIZE, STEPS, MAX_STALENESS = 2, 3, 1


@dataclass(eq=False)
class Event:
    """An operation of a process. result: None while it was under way when its process died."""

    process: str
    kind: str
    result: str | None
    fields: dict[str, Any]


@dataclass
class Story:
    """The operations of a run; none overlap."""

    events: list[Event] = field(default_factory=list)
    batching: str = "strict"

    def add(self, process: str, kind: str, result: str | None = "ok", **fields: Any) -> Event:
        self.events.append(Event(process, kind, result, fields))
        return self.events[-1]

    def copy(self) -> Story:
        return copy.deepcopy(self)

    def find(self, kind: str, **fields: Any) -> int:
        """The place of the first operation with these fields."""
        return next(
            place
            for place, event in enumerate(self.events)
            if event.kind == kind and fields.items() <= event.fields.items()
        )

    def write(self, folder: Path) -> Path:
        """Write the folder of the run."""
        (folder / "history").mkdir(parents=True)
        trainer = {"total_training_steps": STEPS, "max_staleness": MAX_STALENESS, "batching": self.batching}
        settings = {"data": {"train_batch_size": BATCH_SIZE}, "trainer": trainer}
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
        lines: dict[str, list[dict[str, Any]]] = {}
        numbers: dict[str, int] = {}
        for moment, event in enumerate(self.events):
            head = {"run": "r", "service": event.process, "boot": "b", "clock": 0.0, "unix": 1e9}
            rows = lines.setdefault(event.process, [head])
            number = numbers[event.process] = numbers.get(event.process, 0) + 1
            rows.append({"n": number, "at": float(moment), "op": event.kind, **event.fields})
            if event.result is not None:
                rows.append({"n": number, "end": moment + 0.5, "result": event.result})
        for process, rows in lines.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "history" / f"{process}.jsonl").write_text(text)
        return folder


def tell_story() -> Story:
    """A run of three steps whose trainer dies after the first and whose successor ends it."""
    story = Story()

    def place(batch: int, position: int) -> dict[str, Any]:
        return {"batch": batch, "position": position, "attempt": 0, "uid": f"q/train/{2 * batch + position}/0"}

    def issue(trainer: str, epoch: int, batch: int, *results: str | None) -> None:
        for position, result in enumerate(results):
            story.add(trainer, "issue", result, epoch=epoch, stream="trajectories", **place(batch, position))

    def publish(trainer: str, epoch: int, version: int) -> None:
        policy = {"version": version, "epoch": epoch, "digests": [f"digest {version}"], "parts": 0}
        story.add(trainer, "publish", **policy)
        story.add("engine", "load", **policy)
        story.add("engine", "serve", **policy)

    def work(batch: int, version: int, epoch: int) -> None:
        prompts = [{"entry": f"p{batch}{p}", "stream": "trajectories", **place(batch, p)} for p in range(BATCH_SIZE)]
        story.add("worker", "claim_prompts", epoch=0, consumer="w", entries=prompts)
        for prompt in prompts:
            story.add("worker", "finish", epoch=0, versions=[[[version, epoch]], [[version, epoch]]], **prompt)

    def take(trainer: str, epoch: int, batch: int, kind: str = "claim_groups") -> None:
        groups = [{"entry": f"g{batch}{p}", **place(batch, p)} for p in range(BATCH_SIZE)]
        story.add(trainer, kind, epoch=epoch, stream="trajectories", entries=groups)

    def acknowledge(trainer: str, epoch: int, step: int) -> None:
        uids = [place(step, p)["uid"] for p in range(BATCH_SIZE)]
        entries = [f"g{step}{p}" for p in range(BATCH_SIZE)]
        story.add(trainer, "acknowledge", epoch=epoch, step=step, uids=uids, dropped=[], entries=entries, ends=[step])

    story.add("trainer1", "acquire_epoch", epoch=1)
    publish("trainer1", 1, 0)
    issue("trainer1", 1, 1, "ok", "ok")
    issue("trainer1", 1, 2, "ok", "ok")
    work(1, 0, 1)
    take("trainer1", 1, 1)
    work(2, 0, 1)
    publish("trainer1", 1, 1)
    acknowledge("trainer1", 1, 1)
    take("trainer1", 1, 2)
    issue("trainer1", 1, 3, "ok", None)
    story.add("trainer2", "acquire_epoch", epoch=2)
    publish("trainer2", 2, 1)
    acknowledge("trainer2", 2, 1)
    take("trainer2", 2, 2, "reclaim_groups")
    issue("trainer2", 2, 2, "refused", "refused")
    issue("trainer2", 2, 3, "refused", "ok")
    publish("trainer2", 2, 2)
    work(3, 2, 2)
    acknowledge("trainer2", 2, 2)
    take("trainer2", 2, 3)
    publish("trainer2", 2, 3)
    acknowledge("trainer2", 2, 3)
    return story
