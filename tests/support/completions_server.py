"""A small real server of vLLM's completions protocol, over a policy that is a function; and a folder of characters.

A token is a character, and a cached one is never computed: what it tells of its prefix cache is what was asked before.
"""

from __future__ import annotations

import json
import random
import string
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc

from forage_proto.v1.rollout_pb2 import GetStatusRequest, GetStatusResponse, RunRequest, RunResponse
from forage_proto.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from forage_proto.v1.trajectory_pb2 import Policy as Served
from forage_proto.v1.trajectory_pb2 import Prompt, Trajectory, TrajectoryGroup

ALPHABET = string.printable
END_OF_TURN = "<|im_end|>"
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""How a probe samples, whatever a model's own defaults are."""
Policy = Callable[[str, random.Random], str]
"""(context, chance) → continuation of the context."""


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def decode(ids: list[int]) -> str:
    return "".join(ALPHABET[number] for number in ids)


def write_character_model(folder: Path) -> Path:
    """Write a model folder whose tokenizer knows single characters; without weights."""
    folder.mkdir()
    vocabulary = {character: number for number, character in enumerate(ALPHABET)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": [], "decoder": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TURN}))
    return folder


@dataclass
class CompletionsServer:
    """State of the server: its policy, its replies, and the failures to produce.

    Attributes:
        grpc_address: where it says what it serves, and runs prompts by `trajectory`, as the rollout service does.
        digest: of the policy that it serves.
        failures: status codes of the next answers to completions; 400 refuses for good.
        token: the bearer token that it asks for.
        asked: bodies of the completions with a prompt of token ids.
    """

    policy: Policy
    address: str = ""
    grpc_address: str = ""
    digest: str = "first"
    trajectory: Callable[[Prompt], Trajectory] | None = None
    prompts: list[Prompt] = field(default_factory=list)
    max_model_len: int = 4000
    delay_s: float = 0.0
    token: str = ""
    failures: list[int] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a completion."""
        if isinstance(body["prompt"], str):
            assert body["add_special_tokens"] is False
            choice = {"index": 0, "text": "x", "prompt_token_ids": encode(body["prompt"])}
            return {"choices": [choice], "usage": {"completion_tokens": 1}}
        assert {name: body[name] for name in PLAIN} == PLAIN
        context = decode(body["prompt"])
        cached = max((_count_common(body["prompt"], before["prompt"]) for before in self.asked), default=0)
        self.asked.append(body)
        texts = []
        for index in range(body["n"]):
            assert body["include_stop_str_in_output"]
            said = self.policy(context, random.Random(body["seed"] + index))[: body["max_tokens"]]
            before, stop, _ = said.partition(body["stop"][0])
            texts.append(before + stop)
        choices = [{"index": index, "text": text} for index, text in enumerate(texts)]
        usage = {
            "prompt_tokens": len(context),
            "completion_tokens": sum(map(len, texts)),
            "prompt_tokens_details": {"cached_tokens": min(cached, len(context) - 1)},
        }
        return {"choices": choices[::-1], "usage": usage}  # an index says which is which


def _count_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@contextmanager
def serve_completions(policy: Policy) -> Iterator[CompletionsServer]:
    """Serve until the block ends."""
    served = CompletionsServer(policy)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/readyz":
                self.reply(200, {"ready": True})
            elif self.is_allowed():
                assert self.path == "/v1/models"
                self.reply(200, {"data": [{"id": "scripted", "max_model_len": served.max_model_len}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self.is_allowed():
                return
            assert self.path == "/v1/completions"
            assert body["model"] == "scripted"
            if served.failures:
                self.reply(served.failures.pop(0), {"error": {"message": "a scripted failure"}})
                return
            time.sleep(served.delay_s)
            self.reply(200, served.complete(body))

        def is_allowed(self) -> bool:
            if served.token and self.headers.get("authorization") != f"Bearer {served.token}":
                self.reply(401, {"error": {"message": "this service asks for a token"}})
                return False
            return True

        def reply(self, status: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    class Rollout(RolloutServicer):
        def GetStatus(self, _: GetStatusRequest, context: Any) -> GetStatusResponse:
            return GetStatusResponse(serving=Served(version=3, digest=served.digest))

        def Run(self, request: RunRequest, context: Any) -> RunResponse:
            assert served.trajectory is not None
            served.prompts.append(request.prompt)
            return RunResponse(group=TrajectoryGroup(trajectories=[served.trajectory(request.prompt)]))

    status = grpc.server(ThreadPoolExecutor(1))
    add_RolloutServicer_to_server(Rollout(), status)
    served.grpc_address = f"127.0.0.1:{status.add_insecure_port('127.0.0.1:0')}"
    status.start()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield served
    status.stop(None)
    server.shutdown()
    server.server_close()
    thread.join()
