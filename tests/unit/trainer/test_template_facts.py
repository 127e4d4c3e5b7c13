"""What a trainer says of its policy's chat template when it starts."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from forage_runtime.settings import load_settings
from forage_runtime.text.chat_template import ChatTemplate
from forage_trainer.chats.template_facts import Level, TemplateProbe, list_matters


class Template:
    """A tokenizer whose template is a function; `text` is what variables are looked for in."""

    def __init__(self, header: str, text: str = "{{ messages }}") -> None:
        self.header = header
        self.chat_template = text

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool, **_: Any) -> str:
        turns = "".join(f"{one['role'].title()}: {one['content']}\n" for one in messages)
        return turns + self.header * add_generation_prompt


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_a_turn_after_a_plain_assistant_is_warned_of_also_where_the_template_opens_a_thought(opening: str) -> None:
    settings = load_settings(None, ["reward.routes={nq: {name: search_r1_format}}"])
    facts = list_matters(ChatTemplate(Template(f"Assistant: {opening}")), settings)
    assert any("no trajectory can have the format" in fact.seen for fact in facts)


def test_a_text_that_is_no_template_does_not_end_the_trainer_with_a_traceback() -> None:
    template = ChatTemplate(Template("Assistant: ", "{% if %}"))
    settings = load_settings(None, ["data.apply_chat_template_kwargs={thinking: false}"])
    assert list_matters(template, settings) == []


def test_a_template_without_the_question_is_warned_of() -> None:
    class Constant(Template):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "hello"

    facts = list_matters(ChatTemplate(Constant("")), load_settings(None, []))
    assert [(fact.topic, fact.level) for fact in facts] == [("question", Level.WARNING)]


def test_a_template_that_takes_no_answer_is_not_said_to_keep_a_chat() -> None:
    class OneTurn(Template):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            if messages[-1]["role"] == "assistant" or len(messages) > 2:
                raise ValueError("one turn only")
            return super().apply_chat_template(messages, **options)

    facts = TemplateProbe(ChatTemplate(OneTurn("Assistant> ")), {}, date(2026, 11, 28)).list_facts()
    found = {fact.topic: fact.seen for fact in facts}
    assert found["chats"] == "a chat with an answer is refused (one turn only)"
    assert found.keys().isdisjoint({"earlier thoughts", "white space"})
