"""Chats that are sent again keep the tokens that were sampled, or it is known from which token on they do not.

A client of the OpenAI-compatible API sends the history of a chat as text. Encoding it again may give other tokens than
those that were sampled, whose log-probabilities would not be those of the reply. So the prompt and the tokens of each
reply are remembered, and a chat whose rendered text begins with theirs begins with these tokens, too. Chat templates
also rewrite history: they leave out thoughts, strip white space, write today's date. Then the text is another one, and
the first token that differs is reported.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from forage_runtime.text.chat_template import count_common

MOST_TOKENS = 2**21
"""Of all that is remembered: five hundred chats of 4,000 tokens, in 16 to 40 MB beside an engine of gigabytes."""

Message = Mapping[str, Any]


class Codec(Protocol):
    """The policy's tokenizer: texts without added control tokens, and tokens with theirs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Recalled:
    """The tokens of a rendered chat.

    Attributes:
        is_known: a reply in the history was sampled here.
        changed_from: index of the first token that is not that of the last such reply and its prompt; None = all are.
    """

    token_ids: list[int]
    is_known: bool
    changed_from: int | None = None

    def __str__(self) -> str:
        """The value of the header `forage-history`."""
        if not self.is_known:
            return "unknown"
        return "exact" if self.changed_from is None else f"changed-from={self.changed_from}"


@dataclass(frozen=True)
class _Reply:
    """The tokens of a prompt and of the reply to it, and their text with control tokens."""

    ids: array[int]
    text: str


class ChatMemory:
    """Replies of this engine, the least recently used ones forgotten. Not for several threads.

    Of replies with the same history and the same text but other tokens the last one is remembered: a client cannot say
    which of them it means.

    Args:
        longest: tokens that a prompt may have.
        most_tokens: bound of what is remembered; a reply counts with its prompt.
    """

    def __init__(self, codec: Codec, longest: int, most_tokens: int = MOST_TOKENS) -> None:
        self._codec = codec
        self._longest = longest
        self._most_tokens = most_tokens
        self._tokens = 0
        self._replies: OrderedDict[bytes, _Reply] = OrderedDict()  # by the messages up to and with the reply

    @property
    def tokens(self) -> int:
        """Tokens that are remembered."""
        return self._tokens

    def remember(self, messages: Iterable[Message], prompt: Sequence[int], sampled: Sequence[int], text: str) -> None:
        """Remember a reply.

        Args:
            prompt: tokens that were sampled from.
            sampled: tokens of the reply, also those that are not in its text, such as the end of the turn.
            text: the reply as its client got it and will send it again.
        """
        *_, (_, key) = _hash_messages([*messages, {"role": "assistant", "content": text}])
        if (old := self._replies.pop(key, None)) is not None:
            self._tokens -= len(old.ids)
        ids = [*prompt, *sampled]
        self._replies[key] = _Reply(array("i", ids), self._codec.decode(ids))
        self._tokens += len(ids)
        while self._tokens > self._most_tokens:
            self._tokens -= len(self._replies.popitem(last=False)[1].ids)

    def recall(self, messages: Iterable[Message], rendered: list[int]) -> Recalled | None:
        """The tokens with which a chat is to be sampled from; None where its history has no reply.

        Args:
            rendered: tokens of the whole chat, encoded from its text.
        """
        keys = [key for role, key in _hash_messages(messages) if role == "assistant"]
        if not keys:
            return None
        text = self._codec.decode(rendered)
        key = next((key for key in reversed(keys) if key in self._replies), None)
        if key != keys[-1]:  # a client may have changed the last reply, by a stop text that was left out of it
            key = max((key, self._find_longest_start(text)), key=self._count_tokens)
        if key is None:
            return Recalled(rendered, False)
        self._replies.move_to_end(key)
        last = self._replies[key]
        ids = self._keep_tokens(last, rendered, text)
        same = count_common(last.ids, ids)
        return Recalled(ids, True, None if same == len(last.ids) else same)

    def _find_longest_start(self, text: str) -> bytes | None:
        """The key of the longest reply with which the text begins, together with its prompt."""
        starts = (key for key, reply in self._replies.items() if text.startswith(reply.text))
        return max(starts, key=self._count_tokens, default=None)

    def _count_tokens(self, key: bytes | None) -> int:
        return 0 if key is None else len(self._replies[key].ids)

    def _keep_tokens(self, last: _Reply, rendered: list[int], text: str) -> list[int]:
        """Tokens of the reply, as many as the text begins with, and after them those of the rest of the text."""
        kept, decode = last.ids.tolist(), self._codec.decode
        same = count_common(kept, rendered)
        if same == len(kept):
            return rendered
        start = last.text
        if not text.startswith(start):
            shared = bisect_left(range(len(start)), 1, key=lambda end: not text.startswith(start[: end + 1]))
            ends = range(len(kept) + 1)
            kept = kept[: bisect_right(ends, shared, lo=same, key=lambda end: len(decode(kept[:end]))) - 1]
            start = decode(kept)
        rest = self._codec.encode(text[len(start) :])
        # Rather the rendered tokens of the rest: encoded alone, a text may begin with a space that is not in it.
        cuts = (len(rendered) - len(rest) + more for more in (0, 1, -1))
        cut = next((cut for cut in cuts if cut >= 0 and decode(rendered[:cut]) == start), None)
        ids = kept + (rest if cut is None else rendered[cut:])  # None: a token lies across the end of what is kept
        return ids if decode(ids) == text and len(ids) <= self._longest else rendered


def name_chat(body: bytes) -> str:
    """A name that a chat keeps over its turns, from the messages before its first reply; empty where there are none.

    Args:
        body: of a request to `/v1/chat/completions`, which may be anything.
    """
    try:
        begin = takewhile(lambda message: message["role"] != "assistant", json.loads(body)["messages"])
        keys = [key.hex() for _, key in _hash_messages(begin)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""  # vLLM says what is wrong with it
    return keys[-1] if keys else ""


def _hash_messages(messages: Iterable[Message]) -> Iterator[tuple[str, bytes]]:
    """(role, hash of the messages up to and with this one) of each message."""
    digest = hashlib.blake2b(digest_size=16)
    for message in messages:
        role, content = str(message.get("role", "")), message.get("content")
        if isinstance(content, list):  # of parts
            content = "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
        whole = [role, content or "", message.get("tool_calls") or None]
        digest.update(json.dumps(whole, default=str).encode() + b"\n")
        yield role, digest.digest()
