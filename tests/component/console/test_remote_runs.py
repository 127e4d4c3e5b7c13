"""Runs in an object store: the pages about trajectories read them there, with a real server of the S3 protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3fs
from console_client import ConsoleClient
from run_folders import write_run
from s3_server import BUCKET, serve_s3
from step_runs import build_step_row, write_steps
from upath import UPath
from waiting import WAIT_S

from forage_console.store import run_store

VALIDATED = {"uid": "nq/test/1/0", "question": "Who?", "targets": ["x"], "em": 1.0, "reward": 1.0, "spans": []}


@pytest.fixture
def bucket(
    tmp_path: Path, free_address: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[s3fs.S3FileSystem]:
    with serve_s3(free_address().rpartition(":")[2], tmp_path / "s3.log") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield s3fs.S3FileSystem(skip_instance_cache=True)


@pytest.fixture
def uploaded(tmp_path: Path, bucket: s3fs.S3FileSystem) -> Path:
    run = tmp_path / "one"
    run.mkdir()
    write_run(run, {"before": [VALIDATED]}, [{"step": 1, "reward_mean": 0.5}])
    write_steps(run, [build_step_row(1, text="red apple"), build_step_row(2, text="green pear")])
    bucket.put(str(run), f"{BUCKET}/runs/one", recursive=True)
    return run


def test_trajectories_of_a_remote_run_are_read_where_they_are(
    uploaded: Path, bucket: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_store, "LIST_S", 0.0)
    monkeypatch.setattr(run_store, "WAIT_S", WAIT_S)
    client = ConsoleClient(UPath(f"s3://{BUCKET}/runs"))
    page = client.read("/runs/one/trajectories", text="pear")
    assert [(row["place"], row["snippet"] is not None) for row in page["rows"]] == [("step-2", True)]
    assert client.read("/runs/one/trajectories", place="before", text="who")["total"] == 1
    assert client.read("/runs/one/trajectories/step-2/0")["tokens"]["id"] == [1, 2, 3, 4, 5, 6]
    assert client.read("/runs/one/trajectories/before/0")["summary"]["question"] == "Who?"
    assert client.read("/runs/one/steps/1")["metrics"] == {"reward_mean": 0.5}
    assert [one["state"] for one in client.read("/runs/one/steps/1")["groups"]] == ["trained"]
    (tmp_path / "chosen.parquet").write_bytes(client.ask("/runs/one/trajectories.parquet", step_max=1).content)
    assert (tmp_path / "chosen.parquet").stat().st_size > 1000

    write_steps(uploaded, [build_step_row(2, text="blue plum"), build_step_row(3, text="pear")])
    for step in (2, 3):
        name = f"trajectories/step-{step:06d}.parquet"
        bucket.put(str(uploaded / name), f"{BUCKET}/runs/one/{name}")
    bucket.rm(f"{BUCKET}/runs/one/trajectories/step-000001.parquet")
    found = client.read("/runs/one/trajectories", text="pear")
    assert [row["place"] for row in found["rows"]] == ["step-3"]
    assert found["all"] == 2
    assert json.dumps(client.read("/runs/one/facets")["steps"]) == '{"low": 2.0, "high": 3.0}'
