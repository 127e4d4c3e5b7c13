"""Where a trainer starts from, with a real Redis server: recorded for whoever audits the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from key_pairs import make_signatures
from trainer_parts import save_checkpoint

from forage_proto.v1.trajectory_pb2 import Prompt, Shift, TrajectoryGroup
from forage_queue.streams.client import StreamClient
from forage_queue.streams.payloads import Payloads
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_records.questions import Questions
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.retries import RedisRetry
from forage_runtime.settings import RedisSettings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.start import take_over
from forage_trainer.run import _train
from forage_trajectory.codec import pack_group


def open_run(folder: Path) -> tuple[Checkpoints, ReplayGroups]:
    return Checkpoints(folder / "run/checkpoints", 3, 10), ReplayGroups(folder / "run/checkpoints/groups")


def test_a_start_and_a_restored_checkpoint_are_recorded(tmp_path: Path, redis_server: RedisSettings) -> None:
    audit = tmp_path / "audit.jsonl"
    settings = load_settings(None, [f"run.dir={tmp_path}", "run.id=run", f"security.audit_file={audit}"], {})
    streams, retry = StreamClient(redis_server, "run"), RedisRetry(Stop(), Health())
    kept = ReplayGroups(tmp_path / "run/checkpoints/groups")
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", 3, 10, signatures=make_signatures(tmp_path / "keys"))
    take_over(settings, checkpoints, kept, streams, retry, 0)
    saved = save_checkpoint(checkpoints, 5, lambda folder: None)
    take_over(settings, checkpoints, kept, streams, retry, 0)
    first, second = (json.loads(line) for line in audit.read_text().splitlines())
    assert (first["act"], first["actor"], first["run"], first["epoch"]) == ("start_run", "trainer", "run", 1)
    assert (second["act"], second["epoch"], second["step"]) == ("restore_checkpoint", 2, 5)
    assert second["folder"] == str(saved)


def test_a_start_that_is_refused_leaves_the_settings_of_the_run(tmp_path: Path, redis_server: RedisSettings) -> None:
    settings = load_settings(None, [f"run.dir={tmp_path}", "run.id=run"], {})
    streams, retry = StreamClient(redis_server, "run"), RedisRetry(Stop(), Health())
    checkpoints, kept = open_run(tmp_path)
    take_over(settings, checkpoints, kept, streams, retry, 0)
    written = (tmp_path / "run/settings.yaml").read_text()
    save_checkpoint(checkpoints, 5, lambda folder: None)
    other = load_settings(None, [f"run.dir={tmp_path}", "run.id=run", "trainer.resume=false"], {})
    with pytest.raises(UserError, match="holds a checkpoint of step 5"):
        take_over(other, checkpoints, kept, streams, retry, 0)
    assert (tmp_path / "run/settings.yaml").read_text() == written
    assert streams.read_epoch() == 1, "and the trainer that runs goes on"


def test_a_colocated_start_that_cannot_resume_leaves_the_trainer_that_runs_and_its_engines(
    tmp_path: Path, redis_server: RedisSettings
) -> None:
    streams, retry = StreamClient(redis_server, "run"), RedisRetry(Stop(), Health())
    shared = [
        "trainer.placement=colocated",
        "trainer.max_staleness=0",
        "trainer.resume=false",
        "trainer.batch_timeout_s=1",
    ]
    own = [f"run.dir={tmp_path}", "run.id=run", f"redis.url={redis_server.url}", "redis.require_durable=false"]
    settings = load_settings(None, [*own, *shared], {})
    take_over(settings, *open_run(tmp_path), streams, retry, 0)
    shift = Shift(epoch=1, number=1)
    streams.set_shift(shift)
    save_checkpoint(open_run(tmp_path)[0], 5, lambda folder: None)
    with pytest.raises(UserError, match=r"holds a checkpoint of step 5, and trainer.resume is false"):
        _train(settings, Questions((), ""), Questions((), ""), 0, Stop(), Health())
    assert (streams.read_epoch(), streams.read_shift()) == (1, shift)


def test_a_start_with_another_place_of_files_leaves_the_trainer_that_runs_and_its_groups(
    tmp_path: Path, redis_server: RedisSettings
) -> None:
    own = [f"run.dir={tmp_path}", "run.id=run", f"redis.url={redis_server.url}", "redis.require_durable=false"]
    settings = load_settings(None, [*own, "redis.inline_bytes=0"], {})
    streams, retry = StreamClient(settings.redis, "run", payloads=Payloads(settings)), RedisRetry(Stop(), Health())
    streams.create_groups()
    take_over(settings, *open_run(tmp_path), streams, retry, 0)
    streams.issue(Prompt(group_uid="g", batch=1))
    (entry,) = streams.claim_prompts("worker", 1, 0.1)
    group = TrajectoryGroup(group_uid="g", batch=1)
    group.trajectories.add(token_ids=[1, 2])
    assert streams.finish(entry, pack_group(group))
    other = load_settings(None, [*own, f"redis.payloads_url={tmp_path}/elsewhere"], {})
    with pytest.raises(SettingsError, match=r"1 groups .*elsewhere is not the place of these files"):
        _train(other, Questions((), ""), Questions((), ""), 0, Stop(), Health())
    assert streams.read_epoch() == 1
    assert [one.message.read_packed() for one in streams.claim_groups(streams.trajectories, 1, 0.1)] == [
        pack_group(group)
    ]
