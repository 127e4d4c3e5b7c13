"""Verdicts of a language model, from any endpoint that speaks OpenAI's chat completions; kept and rationed.

Every verdict is remembered by a digest of what was asked. Calls are counted against a budget per minute and per
process, each attempt as one, so a run's bill has a bound.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from prometheus_client import Counter

from forage_common.errors import ForageError

MAX_REPLY_BYTES = 2**20
_LINE = re.compile(r"[\W_]*verdict[\W_]*(yes|no|0(?:\.\d{1,6})?|1(?:\.0{1,6})?)[\W_]*", re.IGNORECASE)
_MAX_LINE = 200
_TRANSIENT = {408, 429, 500, 502, 503, 504}
_PAUSE_S = 0.2

ASKED = Counter("forage_reward_judge_calls_total", "Calls of the judging model", ["outcome"])
REMEMBERED = Counter("forage_reward_judge_cached_total", "Verdicts that were known already")


class BudgetSpentError(ForageError):
    """No call is left in this minute or this process."""


class JudgeTimeoutError(ForageError):
    """The endpoint gave no answer in time, after repeated attempts where there was time for them."""


class JudgeReplyError(ForageError):
    """The endpoint refused the request, or its answer holds no verdict."""


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask. `base_url` ends before `/chat/completions`; an empty key sends none."""

    base_url: str
    model: str
    api_key: str
    max_tokens: int


class Budget:
    """At most so many calls in any 60 seconds, and in all. Thread-safe."""

    def __init__(self, per_minute: int, in_all: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._left = in_all
        self._clock = clock
        self._recent: deque[float] = deque()
        self._lock = threading.Lock()

    def spend(self) -> None:
        """Raises: BudgetSpentError, naming which of the two is spent."""
        with self._lock:
            now = self._clock()
            while self._recent and now - self._recent[0] >= 60.0:
                self._recent.popleft()
            if self._left <= 0:
                raise BudgetSpentError("the judge's max_calls are spent")
            if len(self._recent) >= self._per_minute:
                raise BudgetSpentError(f"the judge was asked {self._per_minute} times within a minute")
            self._left -= 1
            self._recent.append(now)


class Verdicts:
    """Asks an endpoint, remembers what it said. Any number of threads may share one."""

    def __init__(self, endpoint: Endpoint, budget: Budget, remembered: int) -> None:
        self._endpoint = endpoint
        self._budget = budget
        self._limit = remembered
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._client = httpx.Client(base_url=endpoint.base_url.rstrip("/") + "/", headers=headers, trust_env=False)

    def of(self, prompt: str, timeout_s: float) -> float:
        """The model's verdict on a prompt, from 0 to 1.

        Raises:
            BudgetSpentError, JudgeTimeoutError, JudgeReplyError.
        """
        key = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                REMEMBERED.inc()
                return self._known[key]
        verdict = parse_verdict(self._ask(prompt, time.monotonic() + timeout_s))
        with self._lock:
            self._known[key] = verdict
            while len(self._known) > self._limit:
                self._known.popitem(last=False)
        return verdict

    def _ask(self, prompt: str, deadline: float) -> str:
        body = {
            "model": self._endpoint.model,
            "messages": [{"role": "user", "content": prompt.encode("utf-8", "replace").decode()}],
            "temperature": 0.0,
            "max_tokens": self._endpoint.max_tokens,
        }
        problem = "it was not asked"
        while (left := deadline - time.monotonic()) > 0:
            self._budget.spend()
            try:
                status, reply = self._post(body, left, deadline)
            except httpx.TransportError as error:
                ASKED.labels("unreachable").inc()
                problem = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    return _content(reply)
                problem = f"status {status}: {reply[:200].decode(errors='replace')}"
                if status not in _TRANSIENT:
                    ASKED.labels("refused").inc()
                    raise JudgeReplyError(f"the judge refused the request ({problem}): check base_url, model and key")
                ASKED.labels("unavailable").inc()
            time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))
        raise JudgeTimeoutError(f"the judge gave no answer in time ({problem})")

    def _post(self, body: dict[str, object], left: float, deadline: float) -> tuple[int, bytes]:
        reply = b""
        with self._client.stream("POST", "chat/completions", json=body, timeout=left) as response:
            for part in response.iter_bytes():
                reply += part
                if len(reply) > MAX_REPLY_BYTES:
                    raise JudgeReplyError(f"the judge's reply is larger than {MAX_REPLY_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the reply came too slowly")
            return response.status_code, reply


def parse_verdict(text: str) -> float:
    """The last line of the form `VERDICT: yes`, `no` or a number from 0 to 1.

    Raises:
        JudgeReplyError: there is none.
    """
    for line in reversed(text.splitlines()):
        found = _LINE.fullmatch(line.strip()) if len(line) <= _MAX_LINE else None
        if found:
            ASKED.labels("verdict").inc()
            word = found[1].lower()
            return {"yes": 1.0, "no": 0.0}[word] if word in ("yes", "no") else float(word)
    ASKED.labels("no_verdict").inc()
    raise JudgeReplyError(f"the judge's answer has no line 'VERDICT: yes' or 'VERDICT: no': {text[-100:]!r}")


def _content(reply: bytes) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        ASKED.labels("malformed").inc()
        raise JudgeReplyError(f"the judge's reply is no chat completion: {reply[:200].decode(errors='replace')!r}")
    return content
