"""The scoring of training scripts without a reward service: joins the text of a row and parses it with patterns."""

from __future__ import annotations

import re
import string

from trajectories import Example

TAGS = ("think", "search", "information", "answer")
NEXT = {
    ("start", "<think>"): "think",
    ("think", "</think>"): "thought",
    ("thought", "<search>"): "search",
    ("thought", "<answer>"): "answer",
    ("search", "</search>"): "searched",
    ("searched", "<information>"): "information",
    ("information", "</information>"): "start",
    ("answer", "</answer>"): "end",
}


def normalize(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def is_valid(text: str) -> bool:
    body = text.split("<|im_start|>assistant", 1)[1]
    if any(len(re.findall(f"<{tag}>", body)) != len(re.findall(f"</{tag}>", body)) for tag in TAGS):
        return False
    state = "start"
    for part in re.split(r"(</?(?:think|search|information|answer)>)", body.removesuffix("<|im_end|>")):
        if re.match(r"</?(?:think|search|information|answer)>", part):
            if (state, part) not in NEXT:
                return False
            state = NEXT[state, part]
        elif part.strip() and state in ("start", "thought", "searched", "end"):
            return False
    return state == "end"


def compute_score(example: Example) -> tuple[float, float]:
    """Compute the layered training score, and exact match for validation."""
    text = "".join(part for _, part in example.spans)
    answers = [match.group(1).strip() for match in re.finditer(r"<answer>(.*?)</answer>", text, re.DOTALL)]
    if len(answers) < 2:  # the first is the example in the prompt
        return 0.0, 0.0
    right = any(normalize(target) == normalize(answers[-1]) for target in example.targets)
    if not is_valid(text):
        return (0.8, 1.0) if right else (0.1, 0.0)
    if right:
        return 1.0, 1.0
    for block in re.findall(r"<information>(.*?)</information>", text.split("assistant", 1)[1], re.DOTALL):
        if any(normalize(target) in normalize(block) for target in example.targets):
            return 0.3, 0.0
    return 0.2, 0.0
