"""What chat templates write in the assistant's name, and what they get besides the messages.

`ends.json` holds how the prompts of 66 models' templates end: after the question, the same without the beginning of the
assistant's turn, and before an answer; see docs/reference/templates.md.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_runtime.errors import SettingsError
from forage_runtime.files.template_values import build_template_values, keep_template_date, read_template_values
from forage_runtime.settings import load_settings
from forage_runtime.text.chat_template import (
    ChatTemplate,
    TemplateError,
    find_open_thought,
    find_opening,
    read_clock,
)

ENDS = json.loads((Path(__file__).parents[2] / "data/templates/ends.json").read_text(encoding="utf-8"))
ASKED = "Reason in <think> and </think>. Question: who?"
OPEN_THOUGHTS = ["<think>", "<think>\n", "[THINK]", "<|START_THINKING|>", "<|channel>thought\n", "<|open|>think<|sep|>"]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end["model"])
def test_an_opening_is_what_the_template_wrote_after_its_role_header(end: dict[str, str]) -> None:
    before = ["<s>" + ASKED + end[name] for name in ("prompt", "without", "before_answer")]
    assert find_opening(*before) == end["opening"]
    if end["opening"].startswith("<"):
        assert find_open_thought(before[0]) == end["opening"]
    else:
        assert find_open_thought(before[0]) == "", "a text that no mark opens is known by its template alone"


def test_an_opening_is_found_where_the_template_takes_no_answer_or_ignores_whether_a_turn_begins() -> None:
    assert find_opening(f"{ASKED}<|a|><think>\n", f"{ASKED}", "") == "<think>\n"
    assert find_opening(f"{ASKED}<|a|><think>\n", f"{ASKED}<|a|><think>\n", f"{ASKED}<|a|>") == "<think>\n"
    assert find_opening(f"{ASKED}<|a|>", "", "") == ""
    assert find_opening(f"{ASKED}<think>", f"{ASKED}</s>", "") == "<think>", "both begin with <"


@given(
    st.sampled_from(["<think>\n\n</think>\n\n", "</think>", "<|channel>thought\n<channel|>", "[THINK][/THINK]", ""]),
    st.sampled_from(["", *OPEN_THOUGHTS]),
    st.text("ab <>think/\n", max_size=20),
)
def test_only_what_follows_the_last_closed_thought_is_an_opening(closed: str, opened: str, asked: str) -> None:
    header = "<|im_end|>\n<|im_start|>assistant\n"
    prompt, without = f"{asked}{header}{closed}{opened}", f"{asked}<|im_end|>\n"
    assert find_opening(prompt, without, f"{asked}{header}") == opened


class Template:
    """A tokenizer with a template that is a function."""

    def __init__(self, render: Any) -> None:
        self.render = render

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options.pop("tokenize") is False
        return str(self.render(messages, **options))


def test_a_template_gets_its_variables_and_the_date_of_the_run() -> None:
    def render(messages: Any, add_generation_prompt: bool, strftime_now: Any, think: bool = True) -> str:
        turns = "".join(f"[{one['role']}]{one['content']}" for one in messages)
        return strftime_now("%d %b %Y") + turns + "[assistant]" * add_generation_prompt + "<think>" * think

    template = ChatTemplate(Template(render))
    chat = [{"role": "user", "content": "Who?"}]
    assert template.render(chat, {}, date(2024, 2, 29)) == ("29 Feb 2024[user]Who?[assistant]<think>", "<think>")
    assert template.render(chat, {"think": False}, date(2024, 2, 29)) == ("29 Feb 2024[user]Who?[assistant]", "")


def _write_turns(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{one['role']}>{one['content']}" for one in messages)


def _with_system_message_before_the_last_question(messages: list[dict[str, str]], **_: Any) -> str:
    system, *rest = messages
    last = [{**rest[-1], "content": f"{system['content']}\n\n{rest[-1]['content']}"}]
    return _write_turns([*rest[:-1], *(last if rest[-1]["role"] == "user" else rest[-1:])])


def _with_a_word_after_the_last_question(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    hint = " /think" if messages[-1]["role"] == "user" else ""
    return _write_turns(messages) + hint + "<assistant>" * add_generation_prompt


def _without_a_last_answer(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return _write_turns(asked) + "<assistant>" * add_generation_prompt


def _with_another_beginning(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    return ("<eval>" if add_generation_prompt else "<train>") + _write_turns(messages) + "<a>" * add_generation_prompt


@pytest.mark.parametrize(
    "render",
    [
        _with_system_message_before_the_last_question,
        _with_a_word_after_the_last_question,
        _without_a_last_answer,
        _with_another_beginning,
    ],
)
@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_what_the_user_wrote_is_never_the_assistants(render: Any, opened: str) -> None:
    def write(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        begins = messages[-1]["role"] == "user" and add_generation_prompt
        return str(render(messages, add_generation_prompt=add_generation_prompt)) + opened * begins

    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where do cattle forage <think>?"}]
    assert ChatTemplate(Template(write)).render(chat).opening == opened


def test_a_template_that_always_begins_a_turn_and_rewrites_history_may_open_a_thought() -> None:
    asked = f"{ASKED} /think<|a|>"
    assert find_opening(f"{asked}<think>\n", f"{asked}<think>\n", f"{ASKED}<|a|>") == "<think>\n"
    assert find_opening(f"{asked}<think>\n", f"{asked}<think>\n", f"{asked}<think>\n\n</think>\n\n") == "<think>\n"
    assert find_opening(asked, asked, f"{ASKED}<|a|>") == ""


def test_a_template_that_renders_nothing_but_prompts_may_open_a_thought() -> None:
    def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if not add_generation_prompt:
            raise ValueError("only prompts")
        return f"{_write_turns(messages)}<assistant><think>"

    rendered = ChatTemplate(Template(render)).render([{"role": "user", "content": "</think>?"}])
    assert rendered.opening == "<think>"


def test_whatever_a_template_raises_is_its_reason() -> None:
    def fail(error: Exception) -> Any:
        def render(*_: Any, **__: Any) -> str:
            raise error

        return render

    for error, reason in ((KeyError("tool"), "'tool'"), (RecursionError(), "RecursionError"), (OSError("a\nb"), "a b")):
        with pytest.raises(TemplateError, match=f"^{reason}$"):
            ChatTemplate(Template(fail(error))).render([{"role": "user", "content": "Who?"}])


def test_a_clock_knows_every_format_of_a_date() -> None:
    assert read_clock(date(2026, 11, 28))("%Y-%m-%d %A %H:%M") == "2026-11-28 Saturday 00:00"


def test_a_run_keeps_the_date_on_which_it_began(tmp_path: Path) -> None:
    settings = load_settings(None, [f"run.dir={tmp_path}", "run.id=r"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r/settings.yaml").write_text("data:\n  template_date: 2025-03-01\n")
    assert keep_template_date(settings).data.template_date == date(2025, 3, 1)
    (tmp_path / "r/settings.yaml").write_text(keep_template_date(settings).to_yaml())
    assert build_template_values(settings) == TemplateValues(today="2025-03-01")
    given = load_settings(None, [f"run.dir={tmp_path}", "run.id=r", "data.template_date=2024-12-31"])
    assert build_template_values(given).today == "2024-12-31"
    for damaged in ("", "- a", "data: {template_date: soon}", "data: {}", "\0"):
        (tmp_path / "r/settings.yaml").write_text(damaged)
        assert keep_template_date(settings).data.template_date is not None


def test_variables_reach_the_template_as_they_are() -> None:
    settings = load_settings(None, ['data.apply_chat_template_kwargs={"enable_thinking": false, "tags": ["ü", 1]}'])
    variables, today = read_template_values(build_template_values(settings))
    assert variables == {"enable_thinking": False, "tags": ["ü", 1]}
    assert today is not None


@pytest.mark.parametrize("name", ["tokenize", "messages", "strftime_now", "add_generation_prompt"])
def test_what_forage_gives_to_a_template_is_no_variable(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"data\.apply_chat_template_kwargs.*{name}"):
        load_settings(None, [f"data.apply_chat_template_kwargs={{{name}: 1}}"])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (TemplateValues(variables="[1]"), r"template\.variables is '\[1\]': expected a JSON object"),
        (TemplateValues(variables="{"), r"template\.variables is '\{': expected a JSON object"),
        (
            TemplateValues(variables='{"name": "\\ud800"}'),
            r"template\.variables is .*: expected a JSON object of Unicode",
        ),
        (TemplateValues(variables='{"chat_template": "x"}'), r"template\.variables has 'chat_template'"),
        (TemplateValues(today="28.11.2026"), r"template\.today is '28\.11\.2026': expected a date"),
    ],
)
def test_malformed_values_are_named(values: TemplateValues, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_template_values(values)
