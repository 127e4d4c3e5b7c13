"""Where a chain of thought begins and ends, in tables and in any text cut into any tokens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_probe.cot import find_cot, kept_lengths
from forage_proto.v1.probe_pb2 import CotBoundary

TABLE = Path(__file__).parents[2] / "data" / "probe" / "boundaries.jsonl"
TAGS = {10: "<thi", 11: "nk>", 20: "</thi", 21: "nk>", 30: "<answ", 31: "er>", 40: "</answ", 41: "er>"}
PIECES = ("<think>", "</think>", "<answer>", "</answer>", "a", " ", "<", ">\n", "é", "<thin", "k>")


@pytest.mark.parametrize(
    "row", [json.loads(line) for line in TABLE.read_text().splitlines()], ids=lambda row: row["why"]
)
def test_boundaries_and_kept_tokens_equal_the_table(row: dict[str, Any]) -> None:
    cot = find_cot([TAGS.get(number) or chr(0x4E00 + number) for number in row["ids"]])
    boundary = CotBoundary.Name(cot.boundary).removeprefix("COT_BOUNDARY_")
    assert (cot.begin, cot.end, boundary) == (row["begin"], row["end"], row["boundary"])
    assert kept_lengths(cot.length, row["points"]) == row["kept"]


@pytest.mark.parametrize(
    ("tokens", "thought"),
    [
        (["<", "think", ">\n", "so", " it", " is", ".</", "think", ">", "x"], ["so", " it", " is"]),
        (["<think>", " so", " </think>", " <answer>"], [" so"]),
        (["a<think>b", "so", "c</think>d"], ["so"]),
        (["<think>", "caf", "", "é", "</think>"], ["caf", "", "é"]),  # one character of two tokens
        (["so", "<", "answer", ">", "x", "</think>"], ["so", "<", "answer", ">", "x"]),
        (["so", " <answer>", "x", " </answer>", "</th"], ["so"]),
    ],
)
def test_tokens_that_merge_a_tag_with_its_neighbours_belong_to_the_tag(tokens: list[str], thought: list[str]) -> None:
    cot = find_cot(tokens)
    assert tokens[cot.begin : cot.end] == thought


@given(st.lists(st.sampled_from(PIECES)), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_thought_lies_between_the_tags_for_every_tokenization(pieces: list[str], points: int, random: Any) -> None:
    text = "".join(pieces)
    cuts = sorted({0, len(text), *(random.randrange(len(text) + 1) for _ in range(random.randrange(9)))})
    for tokens in (list(text), [text[a:b] for a, b in pairwise(cuts)]):
        cot = find_cot(tokens)
        assert 0 <= cot.begin <= cot.end <= len(tokens)
        before, thought = "".join(tokens[: cot.begin]), "".join(tokens[cot.begin : cot.end])
        assert thought == "" or "</think>" not in thought
        if cot.boundary == CotBoundary.COT_BOUNDARY_END:
            assert "</think>" not in text
            assert "<answer>" not in text
        if cot.length and "<think>" in text:
            assert "<think>" in before
        assert before + thought + "".join(tokens[cot.end :]) == text
        kept = kept_lengths(cot.length, points)
        assert (kept[0], kept[-1], len(kept)) == (0, cot.length, points + 1)
        assert kept == sorted(kept)


def test_a_curve_without_points_is_an_error() -> None:
    with pytest.raises(ValueError, match="points is 0"):
        kept_lengths(5, 0)
