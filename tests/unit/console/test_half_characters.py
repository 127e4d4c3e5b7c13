"""Texts of runs and of requests that hold half of a surrogate pair, which no reply can be written with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from console_client import ConsoleClient
from console_runs import Demo, write_demo

HALF = "\ud800"


def spoil(value: Any) -> Any:
    """The same with half of a pair after each text, and after no name."""
    if isinstance(value, str):
        return value + HALF
    if isinstance(value, list):
        return [spoil(one) for one in value]
    return {name: spoil(one) for name, one in value.items()} if isinstance(value, dict) else value


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text in JSON ends with half of a pair, but those that name kinds, phases and so on."""
    folder = write_demo(tmp_path_factory.mktemp("runs") / "one", Demo(steps=4, total=4, saved=(2,), validated=(4,)))
    kept = {"uid", "kind", "service", "role", "phase", "status", "label", "action", "data_source", "split"}
    for file in [*folder.glob("*.json*"), *folder.glob("validation/*.json*")]:
        lines = []
        for line in file.read_text().splitlines():
            tree = json.loads(line)
            changed = spoil(tree)
            lines.append(json.dumps(changed | {name: tree[name] for name in kept & tree.keys()}))
        file.write_text("\n".join(lines) + "\n")
    assert HALF in json.loads((folder / "validation/before.jsonl").read_text().splitlines()[0])["trace_id"]
    return folder.parent


@pytest.fixture(scope="module")
def client(runs: Path) -> ConsoleClient:
    return ConsoleClient(runs, "http://127.0.0.1/{trace_id}")


def test_every_page_of_such_a_run_is_an_answer(client: ConsoleClient) -> None:
    pages = ["/runs", "/runs/one", "/runs/one/trajectories", "/runs/one/questions", "/runs/one/facets"]
    pages += ["/runs/one/curves?names=reward_mean", "/runs/one/steps/2", "/compare?a=one&b=one", "/runs/one/ask"]
    pages += ["/runs/one/trajectories?place=before", "/runs/one/facets?place=before", "/runs/one/health"]
    for place in ("before", "after", "step-2"):
        pages += [f"/runs/one/trajectories/{place}/{row}" for row in range(2)]
    first = client.read("/runs/one/trajectories", place="before")["rows"][0]
    pages += [f"/runs/one/groups/before/{first['uid']}"]
    replies = {page: client.ask(page) for page in pages}
    assert {page: reply.text for page, reply in replies.items() if reply.status_code != 200} == {}
    assert replies["/runs/one/trajectories/before/0"].json()["trace_url"].startswith("http://127.0.0.1/")


@pytest.mark.parametrize("half", ["%ED%A0%80", "%FF", "%00", "\\ud800"])
def test_parameters_that_are_no_text_are_refused_or_find_nothing(client: ConsoleClient, half: str) -> None:
    paths = [
        f"/runs/{half}",
        f"/runs/one{half}/curves",
        f"/runs/one/questions/{half}",
        f"/runs/one/groups/before/{half}",
    ]
    paths += [f"/runs/one/trajectories/{half}/0", f"/runs/one/groups/{half}/x", f"/runs/{half}/steps/2"]
    queries = ["trajectories?text", "trajectories?place", "trajectories?source", "trajectories?order", "facets?place"]
    queries += ["questions?text", "questions?source", "questions?label", "questions?order", "curves?names"]
    paths += [f"/runs/one/{query}={half}" for query in queries]
    paths += [f"/compare?a=one&b=one&{name}={half}" for name in ("text", "source", "label_a", "label_b")]
    paths += [f"/compare?a={half}&b=one", f"/runs/one/trajectories.parquet?text={half}"]
    for path in paths:
        reply = client.ask(path)
        assert reply.status_code in (200, 404, 422), (path, reply.text)
        assert reply.status_code == 200 or list(reply.json()) == ["detail"], path


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/runs/one/notes"), ("POST", "/runs/one/ask"), ("POST", "/runs/one/trajectories/x/0/replay")],
)
@pytest.mark.parametrize("name", ["note", "tags", "question", "environment", "kind"])
def test_bodies_with_half_a_character_are_refused(client: ConsoleClient, method: str, path: str, name: str) -> None:
    for value in (HALF, [HALF], {HALF: HALF}, "x" + HALF * 9):
        reply = client.send(method, path, {name: value})
        assert reply.status_code in (404, 409, 422, 503), reply.text
        assert list(reply.json()) == ["detail"]
