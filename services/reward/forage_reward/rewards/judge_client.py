"""A client for verdicts of a language model, over any endpoint with OpenAI's chat completions API.

Verdicts are cached by a digest of the prompt. Every attempt counts against a budget of calls per minute and per
process, so the cost of a run is bounded.
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

from forage_runtime.clients.outgoing import BlockingClient, UnboundedReplyError
from forage_runtime.errors import ForageError

MAX_REPLY_BYTES = 2**20
_VERDICT_LINE = re.compile(r"[\W_]*verdict[\W_]*(yes|no|0(?:\.\d{1,6})?|1(?:\.0{1,6})?)[\W_]*", re.IGNORECASE)
_MAX_VERDICT_LINE = 200
_TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}
_RETRY_DELAY_S = 0.2

JUDGE_CALLS = Counter("forage_reward_judge_calls_total", "Calls of the judge model", ["outcome"])
CACHE_HITS = Counter("forage_reward_judge_cached_total", "Verdicts taken from the cache")


class BudgetSpentError(ForageError):
    """No call is left in this minute or this process."""


class JudgeTimeoutError(ForageError):
    """The endpoint gave no answer in time, after retries where there was time for them."""


class JudgeReplyError(ForageError):
    """The endpoint refused the request, or its reply holds no verdict."""


@dataclass(frozen=True)
class Endpoint:
    """The address and parameters of a judge. `base_url` ends before `/chat/completions`; an empty key is not sent."""

    base_url: str
    model: str
    api_key: str
    max_tokens: int


class Budget:
    """A limit on the calls in any 60 seconds and on all calls. Thread-safe."""

    def __init__(self, max_per_minute: int, max_calls: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_per_minute = max_per_minute
        self._left = max_calls
        self._clock = clock
        self._recent: deque[float] = deque()
        self._lock = threading.Lock()

    def spend(self) -> None:
        """Count a call. Raises BudgetSpentError, which names the limit that is reached."""
        with self._lock:
            now = self._clock()
            while self._recent and now - self._recent[0] >= 60.0:
                self._recent.popleft()
            if self._left <= 0:
                raise BudgetSpentError("the judge's max_calls are spent")
            if len(self._recent) >= self._max_per_minute:
                raise BudgetSpentError(f"the judge was asked {self._max_per_minute} times within a minute")
            self._left -= 1
            self._recent.append(now)


class JudgeClient:
    """Asks an endpoint for verdicts and caches the last `cache_size` of them. Thread-safe."""

    def __init__(self, endpoint: Endpoint, budget: Budget, cache_size: int) -> None:
        self._endpoint = endpoint
        self._budget = budget
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._client = BlockingClient(endpoint.base_url, MAX_REPLY_BYTES, headers)

    def ask_verdict(self, prompt: str, timeout_s: float) -> float:
        """Return the model's verdict on a prompt, from 0 to 1.

        Raises:
            BudgetSpentError, JudgeTimeoutError, JudgeReplyError.
        """
        key = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                CACHE_HITS.inc()
                return self._cache[key]
        verdict = parse_verdict(self._complete(prompt, time.monotonic() + timeout_s))
        with self._lock:
            self._cache[key] = verdict
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return verdict

    def _complete(self, prompt: str, deadline: float) -> str:
        body = {
            "model": self._endpoint.model,
            "messages": [{"role": "user", "content": prompt.encode("utf-8", "replace").decode()}],
            "temperature": 0.0,
            "max_tokens": self._endpoint.max_tokens,
        }
        problem, asked = "it was not asked", False
        while (left_s := deadline - time.monotonic()) > 0:
            self._budget.spend()
            try:
                answer = self._client.request("POST", "chat/completions", body, left_s)
                status, reply = answer.status, answer.content
            except UnboundedReplyError as error:
                JUDGE_CALLS.labels("malformed").inc()
                raise JudgeReplyError(f"the judge's reply cannot be read: {error}") from None
            except TimeoutError:
                JUDGE_CALLS.labels("unreachable").inc()
                problem = problem if asked else "its reply did not end"
            except httpx.TransportError as error:
                JUDGE_CALLS.labels("unreachable").inc()
                problem = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    return _read_content(reply)
                problem = f"status {status}: {reply[:200].decode(errors='replace')}"
                if status not in _TRANSIENT_STATUSES:
                    JUDGE_CALLS.labels("refused").inc()
                    raise JudgeReplyError(f"the judge refused the request ({problem}): check base_url, model and key")
                JUDGE_CALLS.labels("unavailable").inc()
            asked = True
            time.sleep(max(0.0, min(_RETRY_DELAY_S, deadline - time.monotonic())))  # wait: has a time limit
        raise JudgeTimeoutError(f"the judge gave no answer in time ({problem})")


def parse_verdict(text: str) -> float:
    """Parse the last line of the form `VERDICT: yes`, `no` or a number from 0 to 1.

    Raises:
        JudgeReplyError: there is no such line.
    """
    for line in reversed(text.splitlines()):
        match = _VERDICT_LINE.fullmatch(line.strip()) if len(line) <= _MAX_VERDICT_LINE else None
        if match:
            JUDGE_CALLS.labels("verdict").inc()
            word = match[1].lower()
            return {"yes": 1.0, "no": 0.0}[word] if word in ("yes", "no") else float(word)
    JUDGE_CALLS.labels("no_verdict").inc()
    raise JudgeReplyError(f"the judge's answer has no line 'VERDICT: yes' or 'VERDICT: no': {text[-100:]!r}")


def _read_content(reply: bytes) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        JUDGE_CALLS.labels("malformed").inc()
        raise JudgeReplyError(f"the judge's reply is no chat completion: {reply[:200].decode(errors='replace')!r}")
    return content
