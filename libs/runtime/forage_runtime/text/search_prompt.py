"""The user message of a search question, as in Search-R1."""

from __future__ import annotations

PROMPT_PREFIX = (
    "Answer the given question. "
    "You must conduct reasoning inside <think> and </think> first every time you get new information. "
    "After reasoning, if you find you lack some knowledge, "
    "you can call a search engine by <search> query </search> "
    "and it will return the top searched results between <information> and </information>. "
    "You can search as many times as your want. "
    "If you find no further external knowledge needed, "
    "you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. "
    "For example, <answer> Beijing </answer>. Question: "
)
"""The instruction of Search-R1's data format, verbatim; the question and a newline follow."""


def format_search_prompt(question: str, prefix: str = PROMPT_PREFIX) -> str:
    """Format the user message for a question."""
    return f"{prefix}{question}\n"
