"""Tool calls in Hermes' format, between `<tool_call>` and `</tool_call>`, as OpenAI's clients read them.

Chat templates of Qwen, Hermes and others show tools so. A reply with calls comes back as their list, not as the text
that was sampled; so the text is kept by what the client got, and rendered again as it was.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

OPENING = "<tool_call>"
_CALL = re.compile(rf"{OPENING}(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What a reply says before its calls, and the calls in OpenAI's form; all of it and none where one is malformed."""
    calls = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, []
        arguments = call.get("arguments") or {}
        if not isinstance(arguments, dict):
            return text, []
        function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return (text.partition(OPENING)[0].strip(), calls) if calls else (text, [])


def name_calls(content: str, calls: Sequence[dict[str, Any]]) -> str:
    """The same for a reply with calls and for the message in which a client sends it again, however it writes JSON."""
    functions = [call["function"] for call in calls]
    read = [[function["name"], json.loads(function["arguments"] or "{}")] for function in functions]
    return json.dumps([content.strip(), read], sort_keys=True)


def shows_tools(text: str, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether a rendered chat shows the tools in this format."""
    return OPENING in text and all(tool["function"]["name"] in text for tool in tools)
