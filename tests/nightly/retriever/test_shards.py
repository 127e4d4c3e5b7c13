"""A front over two shards answers like one retriever with the whole corpus."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from waiting import WAIT_S, wait_until

from forage_proto.v1 import retriever_pb2, retriever_pb2_grpc

PLACES = ["Norway", "Oslo", "Bergen", "Kandy", "Colombo", "Galle", "Benin", "Kandi", "Cotonou", "Brazil", "Recife"]
WORDS = (
    "harbour cathedral stone river tea spice island market bridge forest railway theatre museum garden castle temple"
    " fish copper wool coffee school king winter festival tower lake desert ship painter canal valley mountain"
)
QUESTIONS = ["a city by the sea", "old stone church", "tea and coffee", "Oslo", "kandy", "ships in the winter harbour"]


@dataclass
class Processes:
    """The processes of a sharded retriever and of one with the whole corpus."""

    start: Callable[[str], subprocess.Popen[str]]
    running: dict[str, subprocess.Popen[str]]
    http: dict[str, str]
    grpc: dict[str, str]

    def ask(self, name: str, **body: Any) -> httpx.Response:
        return httpx.post(f"http://{self.http[name]}/retrieve", json=body, timeout=WAIT_S).raise_for_status()

    def retrieve_ids(self, name: str, **body: Any) -> list[list[str]]:
        return [[row["id"] for row in rows] for rows in self.ask(name, **body).json()["result"]]

    def wait_for_answers(self, partial: bool) -> None:
        """Send new questions to the front until its answers are complete, or partial."""
        numbers = count()

        def is_so() -> bool:
            answer = self.ask("front", queries=[f"question {next(numbers)}"]).json()
            return answer.get("partial", False) is partial

        wait_until(is_so, f"answers of the front that are {'partial' if partial else 'complete'}")


@pytest.fixture
def processes(
    start_service: Callable[..., Any],
    wait_until_ready: Callable[..., None],
    repository: Path,
    tmp_path: Path,
    free_address: Callable[[], str],
) -> Processes:
    chance = random.Random(0)
    rows = [
        {
            "id": f"{place}-{n}",
            "contents": f'"{place}"\n{place}: {" ".join(chance.sample(WORDS.split(), 9))}.',
            "place": place,
        }
        for place in PLACES
        for n in range(6)
    ]
    parts = {"whole": rows, "first": rows[: len(rows) // 2], "second": rows[len(rows) // 2 :]}
    for name, part in parts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    cache = tmp_path / "cache"
    cache.mkdir()
    for folder in (repository / ".cache/retriever").glob("encoder-*"):  # exported again where missing
        (cache / folder.name).symlink_to(folder)
    http = {name: free_address() for name in (*parts, "front")}
    grpc_ = {name: free_address() for name in (*parts, "front")}

    def start(name: str) -> subprocess.Popen[str]:
        chosen = {"http_address": http[name], "grpc_address": grpc_[name], "cache_dir": str(cache)}
        if name == "front":
            chosen["shards"] = f"[{grpc_['first']}, {grpc_['second']}]"
        else:
            chosen["filter_fields"] = "[place]"
        overrides = [f"retriever.{key}={value}" for key, value in chosen.items()]
        return start_service("retriever", f"data.corpus={tmp_path / f'{name}.jsonl'}", *overrides)  # type: ignore[no-any-return]

    running = {name: start(name) for name in ("first", "second", "front", "whole")}
    for name, process in running.items():
        wait_until_ready(process, http[name])
    return Processes(start, running, http, grpc_)


def test_shards_answer_like_one_index_and_partially_without_one_of_them(processes: Processes) -> None:
    asked = {"queries": QUESTIONS, "topk": 5}
    for mode in ("dense", "title"):
        assert processes.retrieve_ids("front", **asked, mode=mode) == processes.retrieve_ids(
            "whole", **asked, mode=mode
        )
    hybrid, whole = processes.retrieve_ids("front", **asked), processes.retrieve_ids("whole", **asked)
    shared = [len(set(ours) & set(theirs)) for ours, theirs in zip(hybrid, whole, strict=True)]
    assert sum(shared) >= 0.8 * 5 * len(QUESTIONS), (hybrid, whole)  # word frequencies differ between shards
    filtered = {"queries": ["tea"], "topk": 9, "mode": "dense", "filters": {"place": ["Oslo", "Recife"]}}
    assert processes.retrieve_ids("front", **filtered) == processes.retrieve_ids("whole", **filtered)
    row = processes.ask("front", queries=["kandy"], topk=1).json()["result"][0][0]
    assert set(row) == {"id", "contents", "place"}
    known = processes.ask("front", queries=["kept?"])
    assert "partial" not in known.json()

    processes.running["second"].kill()
    partial = processes.ask("front", queries=["lost?"], topk=50, mode="dense")
    assert (partial.json()["partial"], partial.headers["X-Forage-Partial"]) == (True, "1")
    assert {row["place"] for row in partial.json()["result"][0]} <= set(PLACES[:6])
    assert partial.headers["X-Forage-Index-Digest"] == known.headers["X-Forage-Index-Digest"]
    with grpc.insecure_channel(processes.grpc["front"]) as channel:
        reply = retriever_pb2_grpc.RetrieverStub(channel).Retrieve(
            retriever_pb2.RetrieveRequest(queries=["Oslo"], mode="title"), timeout=WAIT_S
        )
    assert (reply.partial, {document.id[:4] for document in reply.results[0].documents}) == (True, {"Oslo"})

    processes.start("second")
    processes.wait_for_answers(partial=False)
    assert processes.retrieve_ids("front", **asked, mode="dense") == processes.retrieve_ids(
        "whole", **asked, mode="dense"
    )

    processes.running["first"].kill()
    processes.wait_for_answers(partial=True)
    metrics = httpx.get(f"http://{processes.http['front']}/metrics", timeout=WAIT_S).text
    assert f'forage_retriever_shard_up{{shard="{processes.grpc["first"]}"}} 0.0' in metrics
    assert httpx.get(f"http://{processes.http['front']}/readyz", timeout=WAIT_S).status_code == 200


def test_a_front_waits_for_its_shards_and_reports_it(
    start_service: Callable[..., Any], free_address: Callable[[], str], tmp_path: Path
) -> None:
    missing, http = free_address(), free_address()
    front = start_service(
        "retriever",
        f"retriever.shards=[{missing}]",
        f"retriever.http_address={http}",
        f"retriever.grpc_address={free_address()}",
    )
    with httpx.Client(transport=httpx.HTTPTransport(retries=50), base_url=f"http://{http}", timeout=WAIT_S) as client:
        while missing not in (probe := client.get("/readyz")).text:
            assert probe.status_code == 503
        refusal = client.post("/retrieve", json={"queries": ["Oslo"], "timeout_s": 1})
        assert (refusal.status_code, refusal.headers["Retry-After"]) == (503, "1")
        assert missing in refusal.json()["detail"]
        assert client.post("/reload").status_code == 409
    front.terminate()
    assert front.wait(WAIT_S) == 0
