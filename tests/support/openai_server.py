"""A small real server of OpenAI's completions, as vLLM or as others speak them; it says given lines, fails on order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "a-model"
_PLAIN = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop"}


@dataclass
class OpenAIServer:
    """State of the server: its replies, and the failures to produce.

    Attributes:
        lines: what is said, one a turn: it counts those that the prompt holds.
        vllm: prompts may be token ids, and the reply has the sampled ones; else texts only.
        strict: fields that are not OpenAI's are refused; else they are ignored.
        failures: status codes of the next answers; 200 stands for an answer without sense.
        token: the bearer token that it asks for.
        asked: bodies of completions that were answered.
    """

    codec: Any
    lines: Sequence[str]
    vllm: bool = True
    strict: bool = False
    models: Sequence[str] = (MODEL,)
    max_model_len: int = 4096
    token: str = ""
    url: str = ""
    failures: list[int] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """(status, reply)."""
        if self.strict and (unknown := body.keys() - _PLAIN):
            return 400, {"error": {"message": f"unknown field {min(unknown)}"}}
        if not self.vllm and not isinstance(body["prompt"], str):
            return 400, {"error": {"message": "prompt must be a text"}}
        self.asked.append(body)
        prompt = body["prompt"] if isinstance(body["prompt"], str) else self.codec.decode(body["prompt"])
        line = self.lines[min(sum(prompt.count(line) for line in self.lines), len(self.lines) - 1)]
        stop = next((stop for stop in body.get("stop", ()) if stop in line), None)
        said = line if stop is None else line.partition(stop)[0] + stop * bool(body.get("include_stop_str_in_output"))
        ids = self.codec.encode(said)
        reason = "length" if len(ids) > body["max_tokens"] else "stop"
        ids = ids[: body["max_tokens"]]
        choice: dict[str, Any] = {"index": 0, "text": self.codec.decode(ids), "finish_reason": reason, "logprobs": None}
        if self.vllm and body.get("return_token_ids"):
            read = self.codec.encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
            choice |= {"token_ids": ids, "prompt_token_ids": read}
        if "logprobs" in body:
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(ids)}
        return 200, {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}


@contextmanager
def serve_openai(codec: Any, lines: Sequence[str], **how: Any) -> Iterator[OpenAIServer]:
    """Serve on a free port of this machine, on threads."""
    served = OpenAIServer(codec, lines, **how)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            cards = [{"id": name, "max_model_len": served.max_model_len} for name in served.models]
            self._answer({}, lambda body: (200 if cards else 404, {"data": cards}))

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))), served.complete)

        def _answer(self, body: dict[str, Any], of: Any) -> None:
            if served.token and self.headers["authorization"] != f"Bearer {served.token}":
                status, reply = 401, {"error": {"message": "who are you?"}}
            elif served.failures:
                status, reply = served.failures.pop(0), {"choices": "none"}
            elif self.path not in ("/v1/models", "/v1/completions"):
                status, reply = 404, {"error": {"message": f"nothing at {self.path}"}}
            elif body and body["model"] not in (served.models or (MODEL,)):
                status, reply = 404, {"error": {"message": f"no model {body['model']}"}}
            else:
                status, reply = of(body)
            text = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    served.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
