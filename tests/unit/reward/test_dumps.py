"""Rows of dumps: every accepted form, and every way to be malformed."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_proto.v1 import trajectory_pb2
from forage_reward.command.dumps import RowError, parse_row, read_row, split_raw_text
from forage_reward.command.score_file import ANY, score_lines
from forage_reward.router import RewardRouter
from forage_reward.trajectory import Action, GroundTruth, Role, Span, Turn
from forage_runtime.settings import RewardPart

SPANS = [{"role": "prompt", "text": "q"}, {"role": "model", "text": "<answer>Oslo</answer>"}]


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"targets": ["Oslo", "oslo"]}, GroundTruth(("Oslo", "oslo"))),
        ({"targets": "Oslo"}, GroundTruth(("Oslo",))),
        ({"targets": [1984]}, GroundTruth(("1984",))),
        ({"targets": []}, GroundTruth()),
        ({"targets": [], "ground_truth": {"target": 7, "numbers": [3]}}, GroundTruth((), 7, (3,))),
        ({"ground_truth": "Oslo"}, GroundTruth(("Oslo",))),
        ({"ground_truth": {"target": ["Oslo"]}}, GroundTruth(("Oslo",))),
        ({"ground_truth": {"target": 7, "numbers": [3, 4]}}, GroundTruth((), 7, (3, 4))),
        ({"reward_model": {"style": "rule", "ground_truth": {"target": ["Oslo"]}}}, GroundTruth(("Oslo",))),
    ],
)
def test_ground_truth_is_read_in_every_supported_form(row: dict[str, Any], truth: GroundTruth) -> None:
    assert read_row({"text": "x", **row}).truth == truth


def test_a_trajectory_keeps_its_spans_turns_and_source() -> None:
    turn = {"action": "answer", "content": "Oslo", "answered": False}
    row = read_row({"spans": SPANS, "turns": [turn], "targets": "a", "data_source": "nq", "end_of_turn": "</s>"})
    assert row.view.spans == (Span(Role.PROMPT, "q"), Span(Role.MODEL, "<answer>Oslo</answer>"))
    assert row.view.turns == (Turn(Action.ANSWER, "Oslo", False),)
    assert (row.view.end_of_turn, row.data_source) == ("</s>", "nq")


def test_a_message_is_read_as_a_file_of_trajectories_has_it() -> None:
    spans = [trajectory_pb2.Span(role=role, text=text) for role, text in ((1, "q"), (2, "<answer>Oslo</answer></s>"))]
    truth = trajectory_pb2.GroundTruth(countdown_target=7, countdown_numbers=[3, 4])
    message = trajectory_pb2.Trajectory(spans=spans, data_source="nq", ground_truth=truth)
    row = {"trajectory": base64.b64encode(message.SerializeToString()).decode(), "end_of_turn": "</s>"}
    read = parse_row(json.dumps(row))
    assert read.view.spans == (Span(Role.PROMPT, "q"), Span(Role.MODEL, "<answer>Oslo</answer></s>"))
    assert (read.view.end_of_turn, read.data_source, read.truth) == ("</s>", "nq", GroundTruth((), 7, (3, 4)))
    del message.spans[1]
    row["trajectory"] = base64.b64encode(message.SerializeToString()).decode()
    for changed, reason in ((row, "no span was written by the model"), ({"trajectory": "?"}, "in base64")):
        with pytest.raises(RowError, match=f"its trajectory cannot be read: .*{reason}"):
            read_row(changed)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("all mine", [(Role.MODEL, "all mine")]),
        ("q\nAssistant: mine", [(Role.PROMPT, "q\nAssistant:"), (Role.MODEL, " mine")]),
        (
            "Assistant: q<|im_start|>assistant\nmine",
            [(Role.PROMPT, "Assistant: q<|im_start|>assistant"), (Role.MODEL, "\nmine")],
        ),
        (
            "a<information>b</information>c",
            [(Role.MODEL, "a"), (Role.ENV, "<information>b</information>"), (Role.MODEL, "c")],
        ),
        ("", []),
    ],
)
def test_a_raw_text_is_split_at_its_role_marker_if_it_has_one(text: str, want: list[tuple[Role, str]]) -> None:
    assert [(span.role, span.text) for span in split_raw_text(text)] == want


def test_the_prompt_of_a_response_is_a_prompt_span() -> None:
    row = read_row({"prompt": "<answer>no</answer>", "response": "yes", "targets": "yes"})
    assert row.view.spans == (Span(Role.PROMPT, "<answer>no</answer>"), Span(Role.MODEL, "yes"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "no object but a list"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "neither spans nor text"),
        ('{"text": 3, "targets": "a"}', "text is no text but a int"),
        ('{"text": "a"}', "no targets"),
        ('{"text": "a", "targets": {"target": null}}', "no targets"),
        ('{"text": "a", "targets": [null]}', "targets are not texts"),
        ('{"text": "a", "ground_truth": {"target": 1.5, "numbers": []}}', "countdown problem"),
        ('{"text": "a", "ground_truth": {"target": 1, "numbers": [true]}}', "countdown problem"),
        ('{"text": "a", "ground_truth": {"target": 1, "numbers": [99999999999999999999]}}', "countdown problem"),
        ('{"text": "\\ud800", "targets": "a"}', "surrogate"),
        ('{"text": "a", "targets": "\\ud800"}', "surrogate"),
        ('{"spans": {}, "targets": "a", "text": 1, "turns": {"a": 1}}', "turns are no list"),
        ('{"spans": [{"role": "user", "text": "a"}], "targets": "a"}', "span 0 is not"),
        ('{"spans": ["a"], "targets": "a"}', "span 0 is not"),
        ('{"text": "a", "targets": "a", "turns": [{"action": "jump"}]}', "turn is not"),
        ('{"text": "a", "targets": "a", "data_source": 1}', "data_source is no text"),
    ],
)
def test_a_malformed_row_raises_an_error_with_its_reason(line: str, sentence: str) -> None:
    with pytest.raises(RowError, match=sentence):
        parse_row(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["spans", "text", "response", "prompt", "turns", "targets", "ground_truth", "reward_model", "data_source"]
JUDGE = RewardRouter({ANY: (RewardPart(name="em"),), "nq": (RewardPart(name="f1"),)})


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), json_values, max_size=5) | json_values, max_size=5))
def test_every_input_line_has_an_output_line(rows: list[Any]) -> None:
    out, done = io.StringIO(), []
    lines = [json.dumps(row) + "\n" for row in rows]
    summary = score_lines(lines, JUDGE, lambda named: ANY, out, done.append)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["line"] for record in records] == list(range(1, len(rows) + 1))
    assert summary.rows == len(rows)
    assert sum(done) == sum(len(line.encode()) for line in lines)
    assert all(record["status"] in ("ok", "invalid_input", "malformed") for record in records)


def test_a_summary_counts_by_data_source_and_averages_only_values() -> None:
    rows = [
        {"text": "<answer>Oslo city</answer>", "targets": "Oslo", "data_source": "nq"},
        {"text": "<answer>Oslo</answer>", "targets": "Oslo", "data_source": "nq"},
        {"text": "<answer>Oslo</answer>", "targets": [], "data_source": "nq"},
        {"text": "<answer>Oslo</answer>", "targets": "Oslo", "data_source": "else"},
    ]
    lines = [*map(json.dumps, rows), "", "{"]
    summary = score_lines(lines, JUDGE, lambda named: named, io.StringIO(), lambda done: None)
    nq, other = summary.sources["nq"], summary.sources["else"]
    assert nq.statuses == {"ok": 2, "invalid_input": 1}
    assert nq.scores == pytest.approx([2 / 3, 1.0])
    assert nq.validations == [0.0, 1.0]
    assert (other.statuses, other.scores) == ({"invalid_input": 1}, [])
    assert [line for line, _ in summary.malformed] == [6]
    assert summary.rows == 5
