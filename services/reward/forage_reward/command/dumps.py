"""Rows of a dump as what rewards see: trajectories by span, or raw texts, with the ground truth in any usual form.

| a row has                                   | it is                                                          |
|---------------------------------------------|----------------------------------------------------------------|
| `spans`: [{role, text}, …]                  | a trajectory; `turns`: [{action, content, answered}] may follow |
| `text` (or `response`), and maybe `prompt`  | a raw text; see `spans_of_text`                                |
| `targets`, or `ground_truth`                | accepted answers, or {target, numbers} of a countdown problem  |
| `data_source`, `end_of_turn`                | what they say                                                  |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forage_reward.parsing.raw_text import ASSISTANT_MARKER, PLAIN_MARKER, spans_from_text
from forage_reward.trajectory import Action, GroundTruth, Role, Span, TrajectoryView, Turn


class RowError(ValueError):
    """A row that cannot be scored; the message says why."""


@dataclass(frozen=True)
class DumpRow:
    """A row that can be scored; `data_source` is "" where it names none."""

    view: TrajectoryView
    truth: GroundTruth
    data_source: str


def parse_row(line: str) -> DumpRow:
    """One line of JSON.

    Raises:
        RowError: not JSON, no object, or without what a reward needs.
    """
    try:
        row = json.loads(line)
    except RecursionError:
        raise RowError("it is nested too deeply") from None
    except ValueError as error:
        raise RowError(f"it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"it is no object but a {type(row).__name__}")
    return row_of(row)


def row_of(row: Mapping[str, Any]) -> DumpRow:
    """A decoded row.

    Raises:
        RowError: it lacks what a reward needs, or holds something else in its place.
    """
    view = TrajectoryView(_spans(row), _text(row, "end_of_turn"), tuple(map(_turn, _list(row, "turns"))))
    return DumpRow(view, _truth(row), _text(row, "data_source"))


def spans_of_text(text: str) -> tuple[Span, ...]:
    """Spans of a raw text: what comes before the first role marker is prompt; without any marker there is none,
    and all of it is the assistant's. `<information>` blocks are the environment's."""
    for marker in (ASSISTANT_MARKER, PLAIN_MARKER):
        if marker in text:
            return spans_from_text(text, marker)
    return spans_from_text(ASSISTANT_MARKER + text)[1:]


def _spans(row: Mapping[str, Any]) -> tuple[Span, ...]:
    if "spans" not in row:
        for name in ("text", "response"):
            if name in row:
                prompt = _text(row, "prompt")
                before = (Span(Role.PROMPT, prompt),) if prompt else ()
                return before + spans_of_text(_text(row, name))
        raise RowError("it has neither spans nor text")
    spans = []
    for index, span in enumerate(_list(row, "spans")):
        try:
            spans.append(Span(Role(span["role"]), _encodable(span["text"], "text")))
        except RowError:
            raise
        except (TypeError, KeyError, ValueError):
            raise RowError(f"span {index} is not {{role: prompt|model|env, text: …}}") from None
    return tuple(spans)


def _turn(turn: Any) -> Turn:
    try:
        return Turn(Action(turn["action"]), _encodable(turn["content"], "content"), bool(turn["answered"]))
    except RowError:
        raise
    except (TypeError, KeyError, ValueError):
        raise RowError("a turn is not {action: invalid|search|answer, content: …, answered: …}") from None


def _truth(row: Mapping[str, Any]) -> GroundTruth:
    truth = row.get("targets", row.get("ground_truth"))
    if truth is None and isinstance(row.get("reward_model"), dict):  # as verl's data sets have it
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
    return GroundTruth(tuple(_encodable(str(target), "targets") for target in targets))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name) or []
    if not isinstance(value, list):
        raise RowError(f"its {name} are no list but a {type(value).__name__}")
    return value


def _text(row: Mapping[str, Any], name: str) -> str:
    return _encodable(row.get(name) or "", name)


def _encodable(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"its {name} is no text but a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RowError(f"its {name} holds half of a surrogate pair, which no tokenizer gives") from None
    return value
