"""Checks of prompts that arrive over gRPC, HTTP and the stream, before anything is spent on them."""

from __future__ import annotations

import math

from forage_proto.v1.trajectory_pb2 import Prompt, Sampling
from forage_queue.rollout.dispatcher import MAX_SAMPLES
from forage_rollout.environments.loading import BUILT_IN, EXPECTED
from forage_runtime.files.template_values import read_template_values

MAX_TOP_K = 2**31 - 1
"""The largest number that a prompt holds; no vocabulary is larger."""


class InvalidPromptError(ValueError):
    """A field of the prompt is invalid; the message names it, its value and what was expected."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} is {value!r}: expected {expected}")
        self.field = field


def check_prompt(prompt: Prompt, vocabulary: int = 0) -> None:
    """Return if the prompt can be run.

    Args:
        vocabulary: size of the vocabulary, which token ids must be below; 0 = not checked.

    Raises:
        InvalidPromptError: the prompt cannot be run.
    """
    if not prompt.messages and not prompt.token_ids:
        raise InvalidPromptError("prompt.messages", [], "at least one {role, content}, or token_ids instead")
    for index, message in enumerate(prompt.messages):
        if not message.role:
            raise InvalidPromptError(f"prompt.messages[{index}].role", "", "user, system or assistant")
    if vocabulary and (largest := max(prompt.token_ids, default=0)) >= vocabulary:
        raise InvalidPromptError("prompt.token_ids", largest, f"ids below {vocabulary}, the model's vocabulary")
    if not 1 <= prompt.samples <= MAX_SAMPLES:
        raise InvalidPromptError("prompt.samples", prompt.samples, f"1 to {MAX_SAMPLES}")
    if prompt.environment and prompt.environment not in BUILT_IN:
        raise InvalidPromptError("prompt.environment", prompt.environment, EXPECTED)
    check_sampling(prompt.sampling)
    try:
        read_template_values(prompt.template)
    except ValueError:
        given = {"variables": prompt.template.variables[:200], "today": prompt.template.today[:40]}
        expected = "a JSON object of the template's own variables, and a date such as 2026-11-28 as today, or neither"
        raise InvalidPromptError("prompt.template", given, expected) from None
    if not (prompt.timeout_s >= 0 and math.isfinite(prompt.timeout_s)):
        raise InvalidPromptError("prompt.timeout_s", prompt.timeout_s, "seconds; or 0 = the service's own limit")


def check_sampling(sampling: Sampling) -> None:
    """Return if the values mean something; bounds of its own an engine tells itself.

    Raises:
        InvalidPromptError: a value is outside its range.
    """
    if not 0 <= sampling.temperature < math.inf:
        raise InvalidPromptError("prompt.sampling.temperature", sampling.temperature, "0 (greedy) or more")
    if not 0 <= sampling.top_p <= 1:
        raise InvalidPromptError("prompt.sampling.top_p", sampling.top_p, "more than 0, at most 1; or 0 = unset")
    if sampling.top_k < -1:
        raise InvalidPromptError("prompt.sampling.top_k", sampling.top_k, "1 or more; or -1 or 0 = all")
