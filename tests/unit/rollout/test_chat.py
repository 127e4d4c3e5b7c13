"""Chats that the template of a policy rejects."""

from __future__ import annotations

from typing import Any

import pytest

from forage_rollout.engine.chat import render_chat


class Template:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        raise self.error


def test_whatever_a_template_raises_is_a_reason_to_reject_the_prompt() -> None:
    for error in (TypeError("can only add\nstr"), KeyError("tool"), RecursionError("deep")):
        with pytest.raises(ValueError, match=r"^(can only add str|'tool'|deep)$"):
            render_chat(Template(error), [{"role": "user", "content": "Who?"}])
