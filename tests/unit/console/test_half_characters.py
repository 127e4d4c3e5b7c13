"""Texts of runs and of requests that hold half of a surrogate pair, which no reply can be written with."""

from __future__ import annotations

from pathlib import Path

import pytest
from console_client import ConsoleClient
from half_characters import HALF, write_spoiled


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spoiled(tmp_path_factory.mktemp("runs") / "one").parent


@pytest.fixture(scope="module")
def client(runs: Path) -> ConsoleClient:
    return ConsoleClient(runs, "http://127.0.0.1/{trace_id}")


def test_every_page_of_such_a_run_is_an_answer(client: ConsoleClient) -> None:
    pages = ["/runs", "/runs/one", "/runs/one/trajectories", "/runs/one/questions", "/runs/one/facets"]
    pages += ["/runs/one/curves?names=reward_mean", "/runs/one/steps/2", "/compare?a=one&b=one"]
    pages += ["/runs/one/trajectories?place=before", "/runs/one/facets?place=before"]
    for place in ("before", "after", "step-2"):
        pages += [f"/runs/one/trajectories/{place}/{row}" for row in range(2)]
    first = client.read("/runs/one/trajectories", place="before")["rows"][0]
    pages += [f"/runs/one/groups/before/{first['uid']}"]
    replies = {page: client.ask(page) for page in pages}
    assert {page: reply.text for page, reply in replies.items() if reply.status_code != 200} == {}
    assert replies["/runs/one/trajectories/before/0"].json()["trace_url"].startswith("http://127.0.0.1/")


def test_questions_of_such_a_validation_are_those_of_its_trajectories(client: ConsoleClient) -> None:
    (before,) = [one for one in client.read("/runs/one")["validations"] if one["label"] == "before"]
    assert before["count"] == client.read("/runs/one/trajectories", place="before")["total"] > 0
    assert client.read("/runs/one/questions")["total"] > 0


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
