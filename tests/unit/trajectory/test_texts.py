"""Texts that tokens imply are left out, and put back as they were."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_proto.v1.trajectory_pb2 import Document, Role, Span, Trajectory, Turn
from forage_runtime.errors import DataError
from forage_runtime.text.observation import escape_tags, format_passages
from forage_trajectory.codec import lacks_texts, leave_out_texts, restore_texts

BODY = "The capital of Norland is Norcity, a town of 40,000 on the river Nor. It was founded in 1320."


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def make(parts: Sequence[tuple[Role.ValueType, str]], documents: Sequence[str] = ()) -> Trajectory:
    made = Trajectory(id="run/g/0")
    for role, text in parts:
        begin = len(made.token_ids)
        made.token_ids.extend(map(ord, text))
        made.spans.append(Span(role=role, begin=begin, end=begin + len(text), text=text))
        if role == Role.ROLE_MODEL:
            made.turns.append(Turn(index=len(made.turns) + 1))
    if documents:
        made.turns[0].documents.extend(Document(id=str(n), contents=text) for n, text in enumerate(documents))
    return made


def search(observation: str, documents: Sequence[str]) -> Trajectory:
    parts = [(Role.ROLE_PROMPT, "Q"), (Role.ROLE_MODEL, "<search>q</search>"), (Role.ROLE_ENV, observation)]
    return make([*parts, (Role.ROLE_MODEL, "<answer>a</answer>")], documents)


def check_round_trip(whole: Trajectory) -> Trajectory:
    slim = Trajectory()
    slim.CopyFrom(whole)
    leave_out_texts(slim, decode)
    back = Trajectory()
    back.CopyFrom(slim)
    restore_texts(back, decode)
    assert back == whole
    return slim


def test_what_tokens_imply_is_left_out_and_other_texts_stay() -> None:
    whole = search("information", [])
    whole.spans[1].text = "cut off after its stop"
    slim = check_round_trip(whole)
    assert [span.text for span in slim.spans] == ["", "cut off after its stop", "", ""]
    assert [span.implied for span in slim.spans] == [True, False, True, True]
    assert lacks_texts(slim)
    assert not lacks_texts(whole)


def test_a_document_is_left_out_as_far_as_the_observation_has_it() -> None:
    documents = [f'"Norland"\n{BODY}', f'"Norcity"\n{BODY[::-1]}']
    slim = check_round_trip(search(format_passages([Document(contents=text) for text in documents]), documents))
    assert [document.contents for document in slim.turns[0].documents] == ['"Norland"\n', '"Norcity"\n']


def test_a_document_that_was_cut_off_or_escaped_keeps_the_rest() -> None:
    tagged = f"{BODY}<answer>no</answer>{BODY}"
    shown = escape_tags(f"Doc 1(Title: T) {tagged}\n")
    (document,) = check_round_trip(search(shown, [f"T\n{tagged}"])).turns[0].documents
    assert document.contents == f"T\n<answer>no</answer>{BODY}"
    (document,) = check_round_trip(search(f"Doc 1(Title: T) {BODY[:50]}", [f"T\n{BODY}"])).turns[0].documents
    assert document.contents == f"T\n{BODY[50:]}"


@pytest.mark.parametrize("documents", [[""], ["only a title"], ["T\nshort"], [f"T\n{BODY}", f"T\n{BODY}"], ["\n" * 60]])
def test_documents_without_a_part_in_the_observation_stay_as_they_are(documents: list[str]) -> None:
    check_round_trip(search(f"nothing of it, {BODY}", documents))


PARTS = st.lists(st.tuples(st.sampled_from([Role.ROLE_MODEL, Role.ROLE_ENV]), st.text(max_size=80)))
WORDS = st.text(st.sampled_from("ab\n é𝄞<>"), max_size=80)


@given(PARTS, st.lists(WORDS, max_size=3), WORDS)
@settings(max_examples=100, deadline=None)
def test_any_trajectory_gets_its_texts_back(
    parts: list[tuple[Role.ValueType, str]], documents: list[str], other: str
) -> None:
    whole = make([(Role.ROLE_PROMPT, other), (Role.ROLE_MODEL, "q"), (Role.ROLE_ENV, "".join(documents)), *parts])
    whole.turns[0].documents.extend(Document(contents=text) for text in documents)
    check_round_trip(whole)


def test_a_tokenizer_that_decodes_another_text_is_noticed_and_changes_nothing() -> None:
    slim = check_round_trip(search("information", []))
    before = slim.SerializeToString()
    with pytest.raises(DataError, match=r"run/g/0 decode to another text.*the same model.path"):
        restore_texts(slim, lambda ids: decode(ids).upper())
    assert slim.SerializeToString() == before


def test_a_quote_of_what_is_not_there_is_refused() -> None:
    slim = check_round_trip(search(f"Doc 1(Title: T) {BODY}", [f"T\n{BODY}"]))
    for field, value in (("begin", 2**31), ("length", 2**32 - 1), ("at", 2**31)):
        damaged = Trajectory()
        damaged.CopyFrom(slim)
        setattr(damaged.turns[0].documents[0].quote, field, value)
        with pytest.raises(DataError, match="quotes what its observation does not have"):
            restore_texts(damaged, decode)


def test_a_trajectory_of_before_is_not_touched() -> None:
    whole = search("information", [])
    before = whole.SerializeToString()
    restore_texts(whole, lambda _: pytest.fail("nothing is to be decoded"))  # type: ignore[arg-type, return-value]
    assert whole.SerializeToString() == before
