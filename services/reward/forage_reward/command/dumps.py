"""Reads rows of a dump as inputs of rewards: spans or raw text, with the ground truth in any usual form.

| a row with                                  | is read as                                                      |
|---------------------------------------------|-----------------------------------------------------------------|
| `trajectory`: a forage.v1.Trajectory        | itself, in base64, as a file of trajectories is read            |
| `spans`: [{role, text}, …]                  | a trajectory; `turns`: [{action, content, answered}] may follow |
| `text` (or `response`), optionally `prompt` | a raw text; see `split_raw_text`                                |
| `targets`, or `ground_truth`                | accepted answers, or {target, numbers} of a countdown problem   |
| `data_source`, `end_of_turn`                | the data source and the end-of-turn text                        |
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError

from forage_proto.v1 import trajectory_pb2
from forage_reward import wire
from forage_reward.parsing.raw_text import ASSISTANT_MARKER, PLAIN_MARKER, split_spans
from forage_reward.trajectory import Action, GroundTruth, Role, Span, TrajectoryView, Turn, join_opening
from forage_runtime.clients.reward import build_score_item


class RowError(ValueError):
    """A row that cannot be scored; the message says why."""


@dataclass(frozen=True)
class DumpRow:
    """A row that can be scored; `data_source` is "" where the row has none."""

    view: TrajectoryView
    truth: GroundTruth
    data_source: str


def parse_row(line: str) -> DumpRow:
    """Parse one line of JSON.

    Raises:
        RowError: it is not a JSON object, or lacks a field that a reward needs.
    """
    try:
        row = json.loads(line)
    except RecursionError:
        raise RowError("it is nested too deeply") from None
    except ValueError as error:
        raise RowError(f"it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"it is no object but a {type(row).__name__}")
    return read_row(row)


def read_row(row: Mapping[str, Any]) -> DumpRow:
    """Read a decoded row.

    Raises:
        RowError: it lacks a field that a reward needs, or has one of a wrong type.
    """
    if "trajectory" in row and not row.keys() & {"spans", "text", "response"}:
        return _read_message(row)
    view = TrajectoryView(
        _read_spans(row), _read_text(row, "end_of_turn"), tuple(map(_read_turn, _read_list(row, "turns")))
    )
    return DumpRow(view, _read_truth(row), _read_text(row, "data_source"))


def _read_message(row: Mapping[str, Any]) -> DumpRow:
    try:
        message = base64.b64decode(_read_text(row, "trajectory"), validate=True)
        item = build_score_item(trajectory_pb2.Trajectory.FromString(message), _read_text(row, "end_of_turn"))
        return DumpRow(wire.read_view(item), wire.read_truth(item), item.data_source)
    except (ValueError, DecodeError) as error:
        reason = str(error) if isinstance(error, wire.InvalidItemError) else "it is no forage.v1.Trajectory in base64"
        raise RowError(f"its trajectory cannot be read: {reason}") from None


def split_raw_text(text: str) -> tuple[Span, ...]:
    """Split a raw text into spans: the prompt ends with the first role marker; without any marker all of the text is
    the assistant's. `<information>` blocks are the environment's."""
    for marker in (ASSISTANT_MARKER, PLAIN_MARKER):
        if marker in text:
            return split_spans(text, marker)
    return split_spans(ASSISTANT_MARKER + text)[1:]


def _read_spans(row: Mapping[str, Any]) -> tuple[Span, ...]:
    if "spans" not in row:
        for name in ("text", "response"):
            if name in row:
                prompt = _read_text(row, "prompt")
                prompt_spans = (Span(Role.PROMPT, prompt),) if prompt else ()
                return prompt_spans + split_raw_text(_read_text(row, name))
        raise RowError("it has neither spans nor text")
    spans = []
    for index, span in enumerate(_read_list(row, "spans")):
        try:
            spans.append(Span(Role(span["role"]), _check_text(span["text"], "text")))
        except RowError:
            raise
        except (TypeError, KeyError, ValueError):
            raise RowError(f"span {index} is not {{role: prompt|opening|model|env, text: …}}") from None
    return join_opening(spans)


def _read_turn(turn: Any) -> Turn:
    try:
        if str(turn["action"]).startswith("ACTION_KIND_"):  # as runs store it
            return wire.read_turn(ParseDict(turn, trajectory_pb2.Turn(), ignore_unknown_fields=True))
        return Turn(Action(turn["action"]), _check_text(turn["content"], "content"), bool(turn["answered"]))
    except RowError:
        raise
    except (TypeError, KeyError, ValueError, ParseError):
        raise RowError(
            "a turn is not {action: invalid|search|answer, content: …, answered: …}, nor a forage.v1.Turn as JSON"
        ) from None


def _read_truth(row: Mapping[str, Any]) -> GroundTruth:
    truth = row.get("targets") or row.get("ground_truth", row.get("targets"))
    if truth is None and isinstance(row.get("reward_model"), dict):  # the form of verl's data sets
        truth = row["reward_model"].get("ground_truth")
    if isinstance(truth, dict):
        target = truth.get("target", truth.get("targets"))
        if "numbers" in truth:
            numbers = truth["numbers"]
            if not isinstance(numbers, list) or not all(map(_is_int, [target, *numbers])):
                raise RowError("a countdown problem is {target: integer, numbers: [integers]}")
            return GroundTruth((), target, tuple(numbers))
        truth = target
    if truth is None:
        raise RowError("it has no targets: give accepted answers, or ground_truth")
    targets = truth if isinstance(truth, list) else [truth]
    if not all(isinstance(target, str | int | float) for target in targets):
        raise RowError("its targets are not texts")
    return GroundTruth(tuple(_check_text(str(target), "targets") for target in targets))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _read_list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name) or []
    if not isinstance(value, list):
        raise RowError(f"its {name} are no list but a {type(value).__name__}")
    return value


def _read_text(row: Mapping[str, Any], name: str) -> str:
    return _check_text(row.get(name) or "", name)


def _check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"its {name} is no text but a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RowError(f"its {name} holds a lone surrogate, which no tokenizer produces") from None
    return value
