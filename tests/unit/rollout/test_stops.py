"""Stop tokens: every token that closes a turn, however the tokenizer spells it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from forage_rollout.engine.stops import find_stop_tokens

STOP = ("</search>", "</answer>")


def test_a_closing_tag_with_spaces_around_it_stops_too() -> None:
    vocabulary = {"</answer>": 1, "Ġ</answer>": 2, "</search>Ċ": 3, "<answer>": 4, "</": 5, "answer>": 6, "</think>": 7}
    assert find_stop_tokens(vocabulary, STOP) == [1, 2, 3]
    assert find_stop_tokens(vocabulary, ("</think>",)) == [7]
    assert find_stop_tokens(vocabulary, ()) == []


def test_the_shipped_policy_closes_its_turns_with_tokens_that_stop(repository: Path) -> None:
    tokenizer = Tokenizer.from_file(str(repository / "models/tiny-policy/tokenizer.json"))
    stops = set(find_stop_tokens(tokenizer.get_vocab(), STOP))
    for text in ("<think> t </think> <search> Kima Kieza </search>", "<answer> Luanda </answer>", "a</answer>"):
        ids = tokenizer.encode(text).ids
        assert [id in stops for id in ids] == [False] * (len(ids) - 1) + [True], text
