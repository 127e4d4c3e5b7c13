"""The events of a run: appended by several processes, read while they are being written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forage_records.events import FILE, Event, EventKind, EventLog, parse_events, read_events
from forage_runtime.errors import DiskFullError
from forage_runtime.files import durable


def test_events_of_several_writers_are_read_in_order(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    trainer, supervisor = EventLog(tmp_path), EventLog(tmp_path)
    trainer.append(EventKind.START, "at step 0 of 40, as epoch 1", 0)
    supervisor.append(EventKind.RESTART, "exit code -9 – 誰", service="rollout")
    trainer.append(EventKind.CHECKPOINT, "checkpoints/step_5", 5)
    events = read_events(tmp_path)
    assert [(e.kind, e.step, e.service) for e in events] == [
        ("start", 0, "trainer"),
        ("restart", None, "rollout"),
        ("checkpoint", 5, "trainer"),
    ]
    assert events[1].text == "exit code -9 – 誰"
    assert events[0].time <= events[1].time <= events[2].time


def test_damaged_lines_and_later_kinds_do_not_hide_the_others() -> None:
    text = '\n'.join((
        '{"time": 1.5, "kind": "start", "text": "a", "step": 0}',
        "no JSON", "[1]", "[" * 99_999, '{"time": "x", "kind": "start", "text": "a"}', '{"kind": "start"}',
        '{"time": 2, "kind": "of a later version", "text": "b", "step": null, "service": "reward", "more": 1}',
        '{"time": 3, "kind": "chec',
    ))  # fmt: skip
    assert list(parse_events(text)) == [
        Event(1.5, "start", "a", 0),
        Event(2.0, "of a later version", "b", None, "reward"),
    ]


def test_a_full_disk_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path)
    log.append(EventKind.START, "first", 0)

    def fail(file: Path, data: bytes) -> None:
        raise DiskFullError(f"{file}: no room")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "append", fail)
        log.append(EventKind.CHECKPOINT, "lost", 5)
    assert "event_not_written" in capsys.readouterr().err
    EventLog(tmp_path / "missing").append(EventKind.START, "no such folder", 0)
    log.append(EventKind.END, "last", 9)
    assert [event.text for event in read_events(tmp_path)] == ["first", "last"]
    assert (tmp_path / FILE).read_text().endswith("\n")


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"
"""What `str.splitlines` takes for the end of a line, and JSON for a character of a text."""


def test_a_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.append(EventKind.FAILURE, f"before{SEPARATORS}after")
    # Lines of another writer, with the characters themselves.
    line = json.dumps({"time": 1.0, "kind": "guard", "text": f"a{SEPARATORS[:3]}b"}, ensure_ascii=False)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(f"{line}\n".encode())
    assert [event.text for event in read_events(tmp_path)] == [f"before{SEPARATORS}after", f"a{SEPARATORS[:3]}b"]


def test_an_event_with_half_of_a_character_is_written(tmp_path: Path) -> None:
    EventLog(tmp_path).append(EventKind.FAILURE, "half \ud800")
    (event,) = read_events(tmp_path)
    assert event.text.startswith("half ")
