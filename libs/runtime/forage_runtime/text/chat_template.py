"""A policy's chat template: a chat as text, and what it writes in the assistant's name.

Templates of reasoning models write the opening of the assistant's turn themselves, such as `<think>`: the policy
samples the rest. That opening is given, not sampled, and belongs to the assistant's text all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple, TypeAlias

Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`, two texts, and maybe what a template reads of tool calls."""

CLOCK = "strftime_now"
"""What transformers calls the function by which a template asks for the current time."""

_ANSWER = "forage"
_MARK = re.compile(
    r"<\|(?P<closes>END|START)_THINKING\|>|\[(?P<slash>/)?THINK\]|<\|channel>thought|<(?P<channel>channel)\|>"
    r"|<\|(?P<close>close|open)\|>think<\|sep\|>|<(?P<tag>/)?(?:\w+:)?think(?:ing)?(?::\w+)?>|◁(?P<arrow>/)?think▷"
)
"""The marks around thoughts of the chat templates of 2026, such as `<think>`, `[THINK]`, `<|channel>thought`."""


class TemplateError(ValueError):
    """The template rejects a chat; the message is its own."""


class RenderedChat(NamedTuple):
    """A chat as text, up to where the policy samples.

    opening: the end of `text` that the template wrote in the assistant's name, such as "<think>" with what follows it;
        empty where there is none, or where all thoughts in it are closed.
    """

    text: str
    opening: str


class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render_text(
        self, chat: Chat, variables: Mapping[str, Any] | None = None, today: date | None = None, prompt: bool = True
    ) -> str:
        """Render a chat.

        Args:
            variables: of the template, as `data.apply_chat_template_kwargs` has them.
            today: the template's current date, see `read_clock`; None: the machine's.
            prompt: end with the beginning of the assistant's turn.

        Raises:
            TemplateError: the template rejects the chat; it is a program, which may raise anything.
        """
        clock = {} if today is None else {CLOCK: read_clock(today)}
        messages = [dict(message) for message in chat]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=prompt, tokenize=False, **(variables or {}), **clock
                )
            )
        except Exception as error:  # noqa: BLE001 - see above
            raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from None

    def render(self, chat: Chat, variables: Mapping[str, Any] | None = None, today: date | None = None) -> RenderedChat:
        """Render a chat, and find the opening of the assistant's turn; raises as `render_text`."""
        text = self.render_text(chat, variables, today)
        without = self._try(chat, variables, today)
        answered = self._try([*chat, {"role": "assistant", "content": _ANSWER}], variables, today)
        asked = str(chat[-1]["content"]).strip() if chat else ""
        if asked and asked in without[count_common(text, without) :]:
            without = ""  # it differs before the last message already, so it does not say where that ends
        # A question may have the answer's word, and a template may drop the answer.
        before_answer = answered.rpartition(_ANSWER)[0] if answered.count(_ANSWER) > text.count(_ANSWER) else ""
        return RenderedChat(text, find_opening(text, without, before_answer))

    def find_unread(self, variables: Mapping[str, Any]) -> list[str]:
        """Name the variables that the template never reads."""
        return sorted(set(variables) - self.find_variables()) if variables else []

    def find_variables(self) -> set[str]:
        """Names that the template, or one of several of the tokenizer, takes from outside."""
        from jinja2 import meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        found: set[str] = set()
        for template in self._texts:
            environment = _compile_jinja_template(template).environment
            found |= meta.find_undeclared_variables(environment.parse(template))
        return found

    @property
    def has_generation_marks(self) -> bool:
        """Whether the template says which of its text the assistant generates."""
        return any(re.search(r"{%-?\s*generation\b", text) for text in self._texts)

    @property
    def _texts(self) -> list[str]:
        templates = self._tokenizer.chat_template
        return list(templates.values() if isinstance(templates, Mapping) else [templates])

    def _try(self, chat: Chat, variables: Mapping[str, Any] | None, today: date | None) -> str:
        try:
            return self.render_text(chat, variables, today, prompt=False)
        except TemplateError:
            return ""


def find_opening(prompt: str, without: str, before_answer: str) -> str:
    """Find what a template writes in the assistant's name at the end of a prompt.

    That is the text from the first mark of a thought behind the last role header, or else what comes where an answer
    would; only what follows the last closed thought of it, and nothing that is white space alone. Where a template
    renders a message in another way once it is answered (as Mistral's with a system message), it is by marks alone.

    Args:
        without: the same chat rendered without the beginning of the assistant's turn; empty: unknown.
        before_answer: the same chat with an answer, rendered up to that; empty: unknown.
    """
    header = count_common(prompt, without) if without else len(prompt)
    answer = count_common(prompt, before_answer) if before_answer else len(prompt)
    if answer < header and (header < len(prompt) or not prompt.startswith(before_answer.rstrip())):
        answer = len(prompt)
    if header == answer == len(prompt):
        return find_open_thought(prompt)
    marks = [mark for mark in _MARK.finditer(prompt) if mark.end() > min(header, answer)]
    begin = min([answer, *(mark.start() for mark in marks)])
    closers = [mark.end() for mark in marks if _closes(mark)]
    opening = prompt[max(closers) :].lstrip() if closers else prompt[begin:]
    return opening if opening.strip() else ""


def find_open_thought(prompt: str) -> str:
    """Find the thought with whose opening a prompt ends, where nobody knows its template; empty: it ends with none."""
    marks = list(_MARK.finditer(prompt))
    if not marks or _closes(marks[-1]) or prompt[marks[-1].end() :].strip():
        return ""
    return prompt[marks[-1].start() :]


def read_clock(today: date) -> Any:
    """What `strftime_now` is for a template: the beginning of that day, in any format of strftime."""
    return datetime.combine(today, time(), UTC).strftime


def _closes(mark: re.Match[str]) -> bool:
    found = mark.groupdict()
    if found["closes"] or found["close"]:
        return found["closes"] == "END" or found["close"] == "close"
    return any(found[name] for name in ("slash", "channel", "tag", "arrow"))


def count_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of items, such as characters or tokens, with which both begin."""
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))
