"""What a model's chat template does that its trainer must know: found by rendering chats, never by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cached_property
from typing import Any

import jinja2

from forage_runtime.files.template_values import keep_template_date
from forage_runtime.settings import Settings
from forage_runtime.text.chat_template import Chat, ChatTemplate, RenderedChat, TemplateError, count_common

_QUESTION, _ANSWER, _THOUGHT = "Which river is the longest?", "The Nile is.", "Forage thinks."
_FORMAT = ("<think>", "</think>")
_FORMATTED = frozenset({"search_r1_format", "structured"})
"""Rewards that read the format of a trajectory."""
_OWN = frozenset({"add_generation_prompt", "bos_token", "documents", "eos_token", "messages", "tools"})
_SWITCHES: Mapping[str, tuple[Any, ...]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "reasoning": (False, True),
    "reasoning_effort": ("low", "high"),
}
"""Variables by which templates of 2026 switch thoughts, and values that they take."""


class Level(StrEnum):
    """How much a fact matters."""

    FINE = "ok"
    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True)
class Fact:
    """One fact about a model.

    Attributes:
        topic: what was looked at, in a word or two.
        seen: what was found.
        done: what Forage does about it; empty where nothing needs doing.
        remedy: what the user should set; empty: nothing.
    """

    topic: str
    seen: str
    done: str = ""
    remedy: str = ""
    level: Level = Level.FINE

    def describe(self) -> str:
        """Describe it in a sentence."""
        return f"{self.topic}: {'; '.join(part for part in (self.seen, self.done, self.remedy) if part)}"


def list_matters(template: ChatTemplate, settings: Settings) -> list[Fact]:
    """List what of a template matters to a run of these settings: the short form of `forage model check`."""
    today = keep_template_date(settings).data.template_date
    assert today is not None, "it has just been set"
    probe = TemplateProbe(template, settings.data.apply_chat_template_kwargs, today)
    facts: list[Fact] = []
    rewards = {part.name for route in settings.reward.routes.values() for part in route}
    try:
        facts += probe.check_variables()
        facts += [
            *probe.check_question(),
            probe.check_opening(),
            probe.check_date(),
            *(probe.check_format() if rewards & _FORMATTED else ()),
        ]
    except (TemplateError, jinja2.TemplateError):  # the latter of a text that is no template
        pass  # the reader of the questions says which of them it refuses, and why
    return [fact for fact in facts if fact.level is not Level.FINE]


@dataclass(frozen=True)
class TemplateProbe:
    """A template, and what the settings give to it."""

    template: ChatTemplate
    variables: Mapping[str, Any]
    today: date

    def list_facts(self) -> list[Fact]:
        """List everything, in the order in which it matters.

        Raises:
            TemplateError: the template does not render a plain question.
        """
        return [
            *self.check_question(),
            self.check_opening(),
            *self.check_format(),
            self.check_system(),
            self.check_two_questions(),
            self.check_tool(),
            *self.check_chats(),
            self.check_date(),
            self.check_switches(),
            *self.check_variables(),
            self.check_masks(),
        ]

    @cached_property
    def rendered(self) -> RenderedChat:
        """A plain question; raises as `list_facts`."""
        return self.template.render([_user(_QUESTION)], self.variables, self.today)

    def render(self, chat: Chat, prompt: bool = False, today: date | None = None, **more: Any) -> str:
        return self.template.render_text(chat, {**self.variables, **more}, today or self.today, prompt)

    def check_question(self) -> list[Fact]:
        """Whether the policy sees the question."""
        if _QUESTION in self.rendered.text:
            return []
        seen = f"the prompt lacks the question, or changes it: {self.rendered.text[-60:]!r}"
        return [Fact("question", seen, "", "give a template that renders the user's message", Level.WARNING)]

    def check_opening(self) -> Fact:
        """How the assistant's turn begins."""
        text, opening = self.rendered
        end = text.rpartition(_QUESTION)[2]
        if opening:
            done = "it is given, not sampled: not trained on, and read as the policy's by rewards, turns and the probe"
            return Fact("opening", f"the template begins the policy's turn with {opening!r}", done, "", Level.NOTE)
        if any(mark in end for mark in _FORMAT) or "think" in end.lower() or "<|channel>" in end:
            seen = f"the prompt ends with a closed thought ({end[-40:]!r})"
            return Fact("opening", seen, "it counts as none: the policy writes its own", "", Level.NOTE)
        return Fact("opening", f"the template begins the policy's turn with its header alone ({end[-40:]!r})")

    def check_format(self) -> list[Fact]:
        """Whether an answer can have the format that `search_r1_format` and `structured` reward."""
        text, opening = self.rendered
        remedy = "set reward.routes to a reward without a format (em, f1), or give a template that opens <think>"
        if opening and not opening.strip().startswith(_FORMAT[0]):
            seen = f"no trajectory can have the format of search_r1_format: it begins with {opening!r}, not <think>"
            return [Fact("format", seen, "", remedy, Level.WARNING)]
        if text.removesuffix(opening).rstrip().endswith("Assistant:"):
            seen = (
                "no trajectory can have the format of search_r1_format: a plain 'Assistant:' begins the policy's turn"
            )
            return [Fact("format", seen, "", remedy, Level.WARNING)]
        return []

    def check_system(self) -> Fact:
        """Whether a system message is taken."""
        return self._check_role("system message", [{"role": "system", "content": _THOUGHT}, _user(_QUESTION)], _THOUGHT)

    def check_two_questions(self) -> Fact:
        """Whether two messages of the user may follow each other."""
        return self._check_role("two user messages in a row", [_user(_THOUGHT), _user(_QUESTION)], _THOUGHT)

    def check_tool(self) -> Fact:
        """Whether a message of a tool may follow a plain turn of the assistant."""
        chat = [_user(_QUESTION), _assistant(_ANSWER), {"role": "tool", "content": _THOUGHT}]
        fact = self._check_role("tool message", chat, _THOUGHT)
        done = "search trajectories do not need it: observations are tokens of the loop, no messages"
        return fact if fact.level is Level.FINE else Fact(fact.topic, fact.seen, done, "", Level.NOTE)

    def check_chats(self) -> list[Fact]:
        """What becomes of the assistant's text in a chat's history."""
        try:
            self.render([_user(_QUESTION), _assistant(_ANSWER), _user(_QUESTION)])
        except TemplateError as error:
            done = "within a trajectory nothing is rendered again"
            return [Fact("chats", f"a chat with an answer is refused ({error})", done, "", Level.NOTE)]
        return [self.check_thoughts(), self.check_white_space(), self.check_history()]

    def check_thoughts(self) -> Fact:
        """Whether earlier thoughts stay in the history."""
        answer = f"<think>{_THOUGHT}</think>{_ANSWER}"
        text = self._try([_user(_QUESTION), _assistant(answer), _user(_QUESTION)])
        if text is not None and _THOUGHT not in text:
            done = "within a trajectory nothing is rendered again, so the policy sees all that it wrote"
            return Fact("earlier thoughts", "left out of the history of a chat", done, "", Level.NOTE)
        return Fact("earlier thoughts", "stay in the history of a chat")

    def check_white_space(self) -> Fact:
        """Whether white space around the assistant's text stays."""
        text = self._try([_user(_QUESTION), _assistant(f" \n{_ANSWER}\n "), _user(_QUESTION)])
        if text is not None and f" \n{_ANSWER}\n " not in text:
            done = "within a trajectory nothing is rendered again"
            return Fact("white space", "of the assistant's text is stripped in a chat's history", done, "", Level.NOTE)
        return Fact("white space", "of the assistant's text stays")

    def check_history(self) -> Fact:
        """Whether a chat that is sent again continues what was sampled."""
        prompt, opening = self.rendered
        said = f"{_THOUGHT}</think>\n\n{_ANSWER}" if opening.lstrip().startswith(_FORMAT[0]) else _ANSWER
        text = self._try([_user(_QUESTION), _assistant(opening + said), _user(_QUESTION)])
        sampled = prompt + said
        if text is None or text.startswith(sampled):
            return Fact("chats", "a chat that is sent again has the tokens that were sampled")
        changed = sampled[count_common(text, sampled) :]
        seen = f"a chat that is sent again differs from what was sampled, from {changed[:30]!r} on"
        done = "an agent's chats over /v1 are other tokens than were sampled there"
        return Fact("chats", seen, done, "train with Forage's own loop, which never renders again", Level.NOTE)

    def check_date(self) -> Fact:
        """Whether the current date is in the prompt."""
        if self.render([_user(_QUESTION)], prompt=True, today=date(2001, 2, 3)) == self.rendered.text:
            return Fact("date", "the prompt has no current date")
        done = f"it stays {self.today}: the run's first day, also after a resume"
        return Fact("date", "the current date is in the prompt", done, "data.template_date sets another", Level.NOTE)

    def check_switches(self) -> Fact:
        """Which variables change whether the policy thinks."""
        known = self.template.find_variables()
        changing = []
        for name in sorted(known & _SWITCHES.keys()):
            for value in _SWITCHES[name]:
                try:
                    changed = self.render([_user(_QUESTION)], prompt=True, **{name: value}) != self.rendered.text
                except TemplateError:
                    continue
                if changed:
                    changing.append(f"{name}={str(value).lower()}")
        if not changing:
            return Fact("thinking", "no variable switches it")
        named = ", ".join(changing)
        return Fact(
            "thinking", f"{named} changes the prompt", "", "set data.apply_chat_template_kwargs to choose", Level.NOTE
        )

    def check_variables(self) -> list[Fact]:
        """Whether the template reads the variables of the settings."""
        unread = self.template.find_unread(self.variables)
        if not unread:
            return []
        known = ", ".join(sorted(self.template.find_variables() - _OWN)) or "none"
        seen = f"the template never reads {', '.join(unread)} of data.apply_chat_template_kwargs"
        return [Fact("variables", seen, "", f"it reads {known}: correct the name or leave it out", Level.WARNING)]

    def check_masks(self) -> Fact:
        """Whether the template marks what the assistant generates."""
        has_marks = self.template.has_generation_marks
        seen = "has generation markers" if has_marks else "has no generation markers: masks made by it are all zero"
        return Fact("masks", f"the template {seen}", "Forage masks by what was sampled, not by the template")

    def _check_role(self, topic: str, chat: Chat, content: str) -> Fact:
        try:
            text = self.render(chat, prompt=True)
        except TemplateError as error:
            remedy = "questions must do without: change the question file's messages, or the template"
            return Fact(topic, f"refused ({error})", "a question with it is named at the start", remedy, Level.WARNING)
        if content not in text:
            return Fact(topic, "dropped in silence", "", "put its text into the user's message", Level.WARNING)
        return Fact(topic, "taken")

    def _try(self, chat: Chat) -> str | None:
        try:
            return self.render(chat)
        except TemplateError:
            return None


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
