"""A rollout service and a retriever on real sockets, whose policy is scripted by the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.parquet as pq

from forage_proto.v1.rollout_pb2 import GetStatusRequest, GetStatusResponse, RunRequest, RunResponse
from forage_proto.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    Component,
    Policy,
    PolicySegment,
    Prompt,
    Role,
    Score,
    Span,
    Status,
    Timings,
    Trajectory,
    Turn,
)
from forage_queue.streams.prompt_identity import build_group, with_prompt_identity

CAPITALS = {"Norway": "Oslo", "Italy": "Rome", "Mongolia": "Ulan Bator", "Peru": "Lima", "Chad": "N'Djamena"}
PASSAGE = '"{0}"\nThe capital is {1}. <answer> {1} </answer>'


def write_questions(file: Path, source: str = "capitals", split: str = "test") -> Path:
    """Five questions in the Search-R1 layout."""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Search. Question: Capital of {country}?\n"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [capital]}},
            "extra_info": {"split": split, "index": index, "question": f"Capital of {country}?"},
        }
        for index, (country, capital) in enumerate(CAPITALS.items())
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


@dataclass
class Scripted(RolloutServicer):
    """Answers a prompt at once.

    Attributes:
        says: (prompt, sample) → the answer; the default is right after a search and in no other case.
        status: of every sample of a prompt. hold: prompts beyond this number are never answered.
    """

    says: Callable[[Prompt, int], str] = lambda prompt, sample: "Paris"
    status: Callable[[Prompt], Status.ValueType] = lambda prompt: Status.STATUS_OK
    serving: Policy = field(default_factory=lambda: Policy(version=7, epoch=2, digest="abc"))
    asked: list[Prompt] = field(default_factory=list)
    hold: int = 1_000_000
    held: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def Run(self, request: RunRequest, context: Any) -> RunResponse:  # the name is gRPC's
        prompt = request.prompt
        self.asked.append(prompt)
        if len(self.asked) > self.hold:
            self.held.set()
            self.over.wait(60)
        trajectories = [
            with_prompt_identity(self._trajectory(prompt, sample), prompt, sample) for sample in range(prompt.samples)
        ]
        return RunResponse(group=build_group(prompt, trajectories))

    def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:
        return GetStatusResponse(serving=self.serving, engines=1)

    def _trajectory(self, prompt: Prompt, sample: int) -> Trajectory:
        status = self.status(prompt)
        if status != Status.STATUS_OK:
            return Trajectory(status=status, status_detail="scripted failure")
        said, (target,) = self.says(prompt, sample), prompt.ground_truth.targets
        searches = 0 if prompt.environment else 1
        spans = [Span(role=Role.ROLE_PROMPT, text=prompt.messages[0].content)]
        if searches:
            shown = f"\n\n<information>The capital is {target}.</information>\n\n"
            spans += [Span(role=Role.ROLE_MODEL, text="<search> it </search>"), Span(role=Role.ROLE_ENV, text=shown)]
        spans.append(Span(role=Role.ROLE_MODEL, text=f"<answer> {said} </answer>"))
        searched = [Turn(index=1, action=ActionKind.ACTION_KIND_SEARCH, content="it", executed=True)] * searches
        return Trajectory(
            spans=spans,
            token_ids=[1] * 20,
            prompt_length=12,
            loss_mask=[1, 1, 1, 0, 0, 1, 1, 1],
            segments=[PolicySegment(version=self.serving.version, epoch=2, begin=0, end=8)],
            turns=[*searched, Turn(index=searches + 1, action=ActionKind.ACTION_KIND_ANSWER, content=said)],
            score=Score(status=Status.STATUS_OK, total=0.5, components=[Component(name="format", raw=searches)]),
            validation_score=Score(status=Status.STATUS_OK, total=float(said == target)),
            finished=True,
            valid_searches=searches,
            timings=Timings(total_s=0.25, score_s=0.25),
            status=Status.STATUS_OK,
        )


class _Http(BaseHTTPRequestHandler):
    """Readiness, and passages for "Capital of X?"."""

    def do_GET(self) -> None:  # the name is http.server's
        self._reply({})

    def do_POST(self) -> None:  # the name is http.server's
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        documents = []
        for query in body["queries"]:
            country = query.removeprefix("Capital of ").removesuffix("?")
            contents = PASSAGE.format(country, CAPITALS.get(country, "unknown"))
            documents.append([{"document": {"id": country, "contents": contents}, "score": 1.0}])
        self._reply({"result": documents})

    def _reply(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(script: Scripted, free_address: Callable[[], str]) -> Iterator[list[str]]:
    """Serve both until the block ends. Yields the settings with their addresses."""
    grpc_address = free_address()
    server = grpc.server(ThreadPoolExecutor(16))
    add_RolloutServicer_to_server(script, server)
    server.add_insecure_port(grpc_address)
    server.start()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Http)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{http.server_port}"
    yield [
        f"rollout.grpc_address={grpc_address}",
        f"rollout.health_address={address}",
        f"retriever.http_address={address}",
    ]
    script.over.set()
    http.shutdown()
    server.stop(None)
