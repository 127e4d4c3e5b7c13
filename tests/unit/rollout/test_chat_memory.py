"""Chats over several turns keep the tokens that were sampled, or the first token that differs is reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forage_rollout.chats.memory import ChatMemory, Codec, Recalled, name_chat
from forage_rollout.loop.tokens import FileTokenizer

EOS, ASSISTANT = "<eos>", "<assistant>"
PIECES = ("<user>", ASSISTANT, "<think>", "</think>", "</a>", " ab", "ab", " a", "a\n", "b</")
VOCABULARY = (EOS, *PIECES, *"ab \n<>/:0123thikuseron")
BEGIN = "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>"
END = "<eos>{% else %}<user>{{ m.content }}<eos>{% endif %}{% endfor %}<assistant>"
TEMPLATES = {
    "continues": BEGIN + "{{ m.content }}" + END,
    "strips": BEGIN + "{{ m.content.strip() }}" + END,
    "drops_thoughts": BEGIN + "{{ m.content.split('</think>')[-1] }}" + END,
    "opens_a_thought": BEGIN + "{{ m.content.split('</think>')[-1] }}" + END + "<think>\n",
    "writes_the_date": "{{ date }}:" + BEGIN + "{{ m.content }}" + END,
}
COMPILED = {name: jinja2.Template(text, keep_trailing_newline=True) for name, text in TEMPLATES.items()}


class GreedyCodec:
    """Encodes the longest tokens first; a policy may sample the same text in other pieces."""

    def __init__(self, vocabulary: Sequence[str] = VOCABULARY) -> None:
        self._tokens = tuple(vocabulary)
        self._longest_first = sorted(range(len(self._tokens)), key=lambda id: -len(self._tokens[id]))

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            ids.append(next(id for id in self._longest_first if text.startswith(self._tokens[id])))
            text = text[len(self._tokens[ids[-1]]) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._tokens[id] for id in token_ids)


GREEDY = GreedyCodec()
TINY = FileTokenizer(Path(__file__).resolve().parents[3] / "models/tiny-policy")
SAMPLED = st.sampled_from([VOCABULARY.index(piece) for piece in (*"ab \n", " a", "ab", "a\n", "<think>", "</think>")])
REPLIES = st.lists(st.tuples(st.lists(SAMPLED, min_size=1, max_size=8), st.booleans()), min_size=2, max_size=4)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def render(name: str, messages: list[dict[str, Any]], date: int = 0) -> str:
    return COMPILED[name].render(messages=messages, date=date)


def recall(memory: ChatMemory, codec: Codec, name: str, messages: list[dict[str, Any]], date: int = 0) -> Recalled:
    found = memory.recall(messages, codec.encode(render(name, messages, date)))
    assert found is not None
    return found


def count_same(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def chat(codec: Codec, name: str, replies: Sequence[tuple[list[int], bool]], ends: int) -> list[Recalled]:
    """A chat with these sampled replies; checks what every template must give, and returns what it gave."""
    memory, messages, found = ChatMemory(codec, 10_000), [user("ab")], []
    before: list[int] = []
    for turn, (sampled, has_ended) in enumerate(replies):
        rendered = codec.encode(render(name, messages, turn))
        one = memory.recall(messages, list(rendered))
        assert (one is None) == (turn == 0)
        prompt = rendered if one is None else one.token_ids
        assert codec.decode(prompt) == codec.decode(rendered), "it is the rendered chat, whatever its tokens are"
        if one is not None:
            found.append(one)
            same = count_same(before, prompt)
            assert one.is_known
            assert one.changed_from == (None if same == len(before) else same)
            if codec.decode(rendered).startswith(codec.decode(before)) and codec is GREEDY:
                assert one.changed_from is None
            if one.changed_from is not None and codec is GREEDY:
                fewest = codec.decode(before[: one.changed_from + 1])
                assert not codec.decode(rendered).startswith(fewest), "no token differs that has the same text"
        tokens = sampled + [ends] * has_ended
        text = codec.decode(sampled)
        memory.remember(messages, prompt, tokens, text)
        before = prompt + tokens
        messages += [assistant(text), user("b a")]
    return found


@given(st.sampled_from(sorted(TEMPLATES)), REPLIES)
def test_a_chat_keeps_its_tokens_or_the_first_that_differs_is_reported(
    name: str, replies: list[tuple[list[int], bool]]
) -> None:
    found = chat(GREEDY, name, replies, VOCABULARY.index(EOS))
    if name == "continues":
        assert [str(one) for one in found] == ["exact"] * len(found)
    if name == "writes_the_date":
        assert [one.changed_from for one in found] == [0] * len(found)


@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(
        st.tuples(st.lists(st.integers(4, TINY.vocabulary_size - 1), min_size=1, max_size=6), st.booleans()),
        min_size=2,
        max_size=3,
    ),
)
def test_so_it_is_with_a_tokenizer_of_bytes_whose_tokens_may_be_parts_of_characters(
    name: str, replies: list[tuple[list[int], bool]]
) -> None:
    chat(TINY, name, replies, TINY.encode(TINY.special_tokens[0])[0])


@pytest.mark.parametrize(
    ("name", "sampled", "expected"),
    [
        ("continues", [" a", "b"], "exact"),  # encoded again it would be " ab"
        ("strips", ["ab"], "exact"),
        ("strips", [" ", "ab"], "changed-from=4"),  # after <user>, "ab", <eos>, <assistant>
        ("strips", ["a", "\n"], "changed-from=5"),
        ("drops_thoughts", ["ab"], "exact"),
        ("drops_thoughts", ["<think>", "a", "</think>", "ab"], "changed-from=4"),
        ("opens_a_thought", ["a", "</think>", "ab"], "changed-from=4"),  # the opening itself
        ("opens_a_thought", ["ab"], "changed-from=4"),
    ],
)
def test_what_each_template_does_to_a_reply(name: str, sampled: list[str], expected: str) -> None:
    memory, messages = ChatMemory(GREEDY, 100), [user("ab")]
    ids = [VOCABULARY.index(token) for token in sampled]
    prompt = GREEDY.encode(render(name, messages))
    memory.remember(messages, prompt, [*ids, 0], "".join(sampled))
    messages += [assistant("".join(sampled)), user("a")]
    found = recall(memory, GREEDY, name, messages)
    assert str(found) == expected
    if expected == "exact":
        assert found.token_ids[: len(prompt) + len(ids) + 1] == [*prompt, *ids, 0]


def test_tokens_of_earlier_turns_are_kept_where_only_the_last_was_rewritten() -> None:
    memory, messages = ChatMemory(GREEDY, 100), [user("ab")]
    pieces = [VOCABULARY.index(" a"), VOCABULARY.index("b")]
    prompt = GREEDY.encode(render("strips", messages))
    memory.remember(messages, prompt, [*GREEDY.encode("a"), *pieces, 0], "a ab")
    messages += [assistant("a ab"), user("a")]
    second = recall(memory, GREEDY, "strips", messages)
    assert second.token_ids[: len(prompt) + 4] == [*prompt, *GREEDY.encode("a"), *pieces, 0]
    memory.remember(messages, second.token_ids, [*pieces, *GREEDY.encode(" "), 0], " ab ")
    messages += [assistant(" ab "), user("a")]
    third = recall(memory, GREEDY, "strips", messages)
    assert third.token_ids[: len(second.token_ids)] == second.token_ids
    assert third.changed_from == len(second.token_ids)


def test_a_stop_text_that_is_left_out_of_the_reply_changes_the_tokens_from_there_on() -> None:
    """And none where the client writes it again, though the reply is then not the one that it got."""
    memory, messages = ChatMemory(GREEDY, 100), [user("ab")]
    pieces = [VOCABULARY.index(token) for token in (" a", "b", "</a>")]
    prompt = GREEDY.encode(render("continues", messages))
    memory.remember(messages, prompt, pieces, " ab")
    found = recall(memory, GREEDY, "continues", [*messages, assistant(" ab"), user("a")])
    assert found.token_ids[: len(prompt) + 2] == [*prompt, *pieces[:2]]
    assert found.changed_from == len(prompt) + 2
    whole = recall(memory, GREEDY, "continues", [*messages, assistant(" ab</a>"), user("a")])
    assert str(whole) == "exact"
    assert whole.token_ids[: len(prompt) + 3] == [*prompt, *pieces]


def test_a_token_across_the_end_of_the_reply_is_cut() -> None:
    """A reply that its length has ended, in a template that goes on with a letter."""
    codec = GreedyCodec((*VOCABULARY, "a0"))
    memory, messages = ChatMemory(codec, 100), [user("b")]
    memory.remember(messages, codec.encode("<user>b"), codec.encode("a"), "a")
    found = memory.recall([*messages, assistant("a"), user("0")], codec.encode("<user>ba0"))
    assert found is not None
    assert [codec.decode([id]) for id in found.token_ids] == ["<user>", "b", "a", "0"]
    assert found.changed_from is None


def test_a_tokenizer_that_puts_a_space_before_text_gets_none_between_reply_and_rest(tmp_path: Path) -> None:
    """As those of Llama 2 and Mistral do; their templates go on with text and not with a control token."""
    pieces = ["▁", "a", "b", "[", "U", "A", "]", "ab", "▁a", "▁ab", "▁["]
    model = models.BPE(
        {piece: id for id, piece in enumerate(pieces)}, [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "[")]
    )
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    codec = FileTokenizer(tmp_path)
    memory, messages = ChatMemory(codec, 100), [user("ab")]
    prompt, sampled = codec.encode("[U]ab[A]"), [pieces.index(piece) for piece in ("▁", "a", "b")]
    memory.remember(messages, prompt, sampled, " ab")
    found = memory.recall([*messages, assistant(" ab"), user("b")], codec.encode("[U]ab[A] ab[U]b[A]"))
    assert str(found) == "exact"
    assert found
    assert [made.id_to_token(id) for id in found.token_ids[len(prompt) :]] == ["▁", "a", "b", *"[U]b[A]"]


def test_branches_of_a_chat_have_their_own_tokens() -> None:
    memory, messages = ChatMemory(GREEDY, 100), [user("ab")]
    prompt = GREEDY.encode(render("continues", messages))
    branches = {" ab": [" a", "b"], "ab": ["a", "b"], " a": [" ", "a"]}
    for text, pieces in branches.items():
        memory.remember(messages, prompt, [VOCABULARY.index(piece) for piece in pieces] + [0], text)
    for text, pieces in branches.items():
        found = recall(memory, GREEDY, "continues", [*messages, assistant(text), user("a")])
        assert str(found) == "exact"
        assert [VOCABULARY[id] for id in found.token_ids[len(prompt) : len(prompt) + 3]] == [*pieces, EOS]


def test_a_history_that_was_not_sampled_here_is_unknown_and_one_without_replies_is_nothing() -> None:
    memory = ChatMemory(GREEDY, 100)
    messages = [user("ab"), assistant("ab"), user("a")]
    rendered = GREEDY.encode(render("continues", messages))
    found = memory.recall(messages, rendered)
    assert (str(found), found and found.token_ids) == ("unknown", rendered)
    assert memory.recall([user("ab")], rendered) is None
    assert memory.recall([], []) is None


def test_content_may_be_text_or_parts() -> None:
    memory, messages = ChatMemory(GREEDY, 100), [user("ab")]
    prompt = GREEDY.encode(render("continues", messages))
    memory.remember(messages, prompt, [*GREEDY.encode("ab"), 0], "ab")
    parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    parts += [{"role": "assistant", "content": [{"type": "text", "text": "ab"}]}, user("a")]
    rendered = GREEDY.encode(render("continues", [*messages, assistant("ab"), user("a")]))
    assert str(memory.recall(parts, rendered)) == "exact"


def test_the_least_recently_used_replies_are_forgotten() -> None:
    memory = ChatMemory(GREEDY, 100, most_tokens=20)

    def chats(number: int) -> list[dict[str, Any]]:
        return [user(f"{number}")]

    def ask(number: int) -> str:
        return str(recall(memory, GREEDY, "continues", [*chats(number), assistant("ab"), user("a")]))

    for number in (0, 1, 2):
        prompt = GREEDY.encode(render("continues", chats(number)))  # 4 tokens, and 2 of the reply
        memory.remember(chats(number), prompt, [*GREEDY.encode("ab"), 0], "ab")
        memory.remember(chats(number), prompt, [*GREEDY.encode("ab"), 0], "ab")
        assert memory.tokens <= 20
    assert [ask(number) for number in (0, 1, 2)] == ["exact"] * 3
    assert ask(0) == "exact"
    memory.remember([user("b")], GREEDY.encode("b"), [0], "")
    memory.remember([user("a")], GREEDY.encode("a"), [0], "")
    assert [ask(number) for number in (0, 1, 2)] == ["exact", "unknown", "exact"]
    memory.remember([user("a")], [1] * 30, [0], "")  # more than there is room for
    assert memory.tokens == 0


def test_a_prompt_is_not_made_longer_than_the_model_takes() -> None:
    messages = [user("ab")]
    prompt = GREEDY.encode(render("continues", messages))
    pieces = [VOCABULARY.index(token) for token in (" ", "a", "b", EOS)]
    again = [*messages, assistant(" ab"), user("a")]
    rendered = GREEDY.encode(render("continues", again))
    for longest, expected in ((len(rendered) + 2, "exact"), (len(rendered) + 1, f"changed-from={len(prompt)}")):
        memory = ChatMemory(GREEDY, longest)
        memory.remember(messages, prompt, pieces, " ab")
        assert str(memory.recall(again, list(rendered))) == expected


def test_a_chat_keeps_its_name_over_its_turns() -> None:
    def name(*messages: Any) -> str:
        return name_chat(json.dumps({"messages": messages}).encode())

    begin = [{"role": "system", "content": "x"}, user("ab")]
    assert name(*begin) == name(*begin, assistant("a"), user("b")) != ""
    assert len({name(*begin), name(user("ab")), name(*begin, user("b"))}) == 3


@pytest.mark.parametrize("messages", [b"3", b"[3]", b"[{}]", b"[]", b'[{"role":"assistant"}]', b"[" * 100_000, b"\xff"])
def test_what_is_no_chat_has_no_name(messages: bytes) -> None:
    assert [name_chat(body) for body in (messages, b'{"messages":%s}' % messages)] == ["", ""]
