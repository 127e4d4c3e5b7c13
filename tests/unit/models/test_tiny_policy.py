"""The tiny policy: its tokenizer keeps every text, its demonstrations look like rollouts."""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_episodes import GUESSES, NAMER, TWO_HOPS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from forage_models.tiny_policy import demonstrations as demos
from forage_models.tiny_policy.demonstrations import Demonstrator, Mode, Role, build_prompt_segment, encode
from forage_models.tiny_policy.evaluate import is_exact_match
from forage_models.tiny_policy.facts import rename_entities
from forage_models.tiny_policy.tokenizer import (
    DOCUMENT_HEADS,
    FEEDBACK,
    SPACED_TAGS,
    TAGS,
    VOCABULARY,
    list_added_tokens,
    split_instruction,
)
from forage_runtime.text.search_prompt import PROMPT_PREFIX, format_search_prompt

SHIPPED = Path(__file__).parents[3] / "models" / "tiny-policy"
TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(SHIPPED)


@given(st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    normal = unicodedata.normalize("NFC", text)
    assert TOKENIZER.decode(TOKENIZER.encode(normal)) == normal


@given(
    st.lists(
        st.sampled_from([*list_added_tokens(), " Erdenet", " ", "\n", "<", ">", "search", "Doc 1", "é"]), max_size=12
    )
)
def test_tags_amid_any_text_survive_the_tokenizer(parts: list[str]) -> None:
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("text", [*TAGS, *SPACED_TAGS, *FEEDBACK, *DOCUMENT_HEADS, *split_instruction()])
def test_fixed_texts_are_one_token(text: str) -> None:
    assert len(TOKENIZER.encode(text)) == 1


def test_the_instruction_is_split_into_sentences() -> None:
    assert "".join(split_instruction()) + " " == PROMPT_PREFIX
    assert len(TOKENIZER.encode(format_search_prompt("Which country has the capital Oslo?"))) <= 24


def test_a_stop_string_ends_with_a_token() -> None:
    for text in ("<think> look it up </think> <search> Erdenet </search>", "<answer>Tugrik</answer>"):
        ids = TOKENIZER.encode(text)
        assert TOKENIZER.decode(ids[-1:]).strip() == text[text.rindex("</") :]


def test_a_name_has_the_same_tokens_in_question_query_passage_and_answer() -> None:
    name = TOKENIZER.encode(" Porto-Novo")
    for text in (
        "Question: What is the currency of the country whose capital is Porto-Novo?",
        "<think> look it up </think> <search> Porto-Novo </search>",
        '\n\n<information>Doc 1(Title: "Porto-Novo") Porto-Novo is the capital of Benin.</information>\n\n',
        "<think> found it </think> <answer> Porto-Novo </answer>",
    ):
        ids = TOKENIZER.encode(text)
        assert any(ids[at : at + len(name)] == name for at in range(len(ids))), text


def test_the_chat_template_is_qwens_without_a_system_message() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_the_right_demonstration_is_laid_out_like_a_rollout() -> None:
    turns = Demonstrator(NAMER, GUESSES).write_turns(TWO_HOPS, Mode.RIGHT, random.Random(0), simple=True)
    assert [(turn.role, turn.text) for turn in turns] == [
        (Role.MODEL, "<think> look it up </think> <search> Erdenet </search>"),
        (Role.ENV, '\n\n<information>Doc 1(Title: "Erdenet") Erdenet is a city in Mongolia.</information>\n\n'),
        (Role.MODEL, "<think> look further </think> <search> Mongolia </search>"),
        (
            Role.ENV,
            '\n\n<information>Doc 1(Title: "Mongolia") The capital of Mongolia is Ulaanbaatar. '
            "The currency of Mongolia is Tugrik.</information>\n\n",
        ),
        (Role.MODEL, "<think> found it </think> <answer> Tugrik </answer>"),
    ]


def test_segments_are_tokenised_one_by_one() -> None:
    turns = Demonstrator(NAMER, GUESSES).write_turns(TWO_HOPS, Mode.RIGHT, random.Random(0))
    segments = [build_prompt_segment(TOKENIZER, TWO_HOPS.question), *turns]
    ids = encode(TOKENIZER, segments)
    assert ids == [token for segment in segments for token in TOKENIZER.encode(segment.text)]
    assert TOKENIZER.decode(ids) == "".join(segment.text for segment in segments)
    assert max(ids) < VOCABULARY


@pytest.mark.parametrize("mode", list(Mode))
def test_only_the_right_mode_answers_right(mode: Mode) -> None:
    demonstrator, rng = Demonstrator(NAMER, GUESSES), random.Random(1)
    for _ in range(50):
        turns = demonstrator.write_turns(TWO_HOPS, mode, rng)
        assert [turn.role for turn in turns] == [Role.MODEL, Role.ENV] * (len(turns) // 2) + [Role.MODEL]
        answers = re.findall("<answer>(.*?)</answer>", turns[-1].text)
        recovered = mode is Mode.BROKEN and len(turns) > 1
        if not recovered:
            assert is_exact_match(answers[-1] if answers else None, TWO_HOPS.targets) == (mode is Mode.RIGHT)


def test_the_first_thought_reveals_the_mode() -> None:
    demonstrator, rng = Demonstrator(NAMER, GUESSES), random.Random(2)
    opening = {
        mode: Counter(TOKENIZER.encode(demonstrator.write_turns(TWO_HOPS, mode, rng)[0].text)[1] for _ in range(30))
        for mode in (Mode.RIGHT, Mode.GUESS, Mode.WRONG)
    }
    assert all(len(counts) == 1 for counts in opening.values())
    assert len({next(iter(counts)) for counts in opening.values()}) == 3


def test_the_mixture_sums_to_one_and_guessing_is_most_likely() -> None:
    assert sum(demos.MIXTURE.values()) == pytest.approx(1)
    assert max(demos.MIXTURE, key=demos.MIXTURE.__getitem__) is Mode.GUESS


def test_renaming_replaces_a_name_by_the_same_name_everywhere() -> None:
    episode = rename_entities(TWO_HOPS, NAMER, random.Random(3))
    city, country = (document.title for document in episode.hops)
    assert f" {city} " in episode.question
    assert episode.hops[0].text == f"{city} is a city in {country}."
    assert episode.hops[1].text.endswith(f"The currency of {country} is {episode.targets[0]}.")
    assert "Mongolia" not in f"{episode}"
