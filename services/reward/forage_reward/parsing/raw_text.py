"""Spans of a raw dump: one text of prompt, generations and observations, as other tools write it.

For comparison with such tools only: a dump cannot show whether the model wrote an `<information>` block itself.
"""

from __future__ import annotations

from forage_reward.trajectory import Role, Span
from forage_runtime.text.tags import CLOSE, OPEN, Tag

ASSISTANT_MARKER = "<|im_start|>assistant"
PLAIN_MARKER = "Assistant:"
"""The end of prompts without a chat template."""


def split_spans(text: str, assistant_marker: str = ASSISTANT_MARKER) -> tuple[Span, ...]:
    """Split a dump at the first assistant marker, then at complete `<information>` blocks.

    Args:
        text: the whole dump.
        assistant_marker: the text that opens an assistant turn; it is part of the prompt.

    Returns:
        prompt, model and env spans whose concatenation is `text`. Without a marker all of it is prompt.
    """
    head, marker, rest = text.partition(assistant_marker)
    spans = [Span(Role.PROMPT, head + marker)]
    opener, closer = OPEN[Tag.INFORMATION], CLOSE[Tag.INFORMATION]
    position = 0
    while True:
        begin = rest.find(opener, position)
        end = rest.find(closer, begin + len(opener)) if begin >= 0 else -1
        if end < 0:
            break
        end += len(closer)
        spans += [Span(Role.MODEL, rest[position:begin]), Span(Role.ENV, rest[begin:end])]
        position = end
    spans.append(Span(Role.MODEL, rest[position:]))
    return tuple(span for span in spans if span.text)
