"""Where a trainer starts from, with a real Redis server: recorded for whoever audits the run."""

from __future__ import annotations

import json
from pathlib import Path

from key_pairs import make_signatures
from trainer_parts import save_checkpoint

from forage_common.settings import RedisSettings, load_settings
from forage_common.stop import Stop
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_trainer.checkpoints.checkpoint import Checkpoints
from forage_trainer.checkpoints.kept_groups import KeptGroups
from forage_trainer.checkpoints.start import take_over
from forage_trainer.waiting import RedisRetry


def test_a_start_and_a_restored_checkpoint_are_recorded(tmp_path: Path, redis_server: RedisSettings) -> None:
    audit = tmp_path / "audit.jsonl"
    settings = load_settings(None, [f"run.dir={tmp_path}", "run.id=run", f"security.audit_file={audit}"], {})
    streams, retry = StreamClient(redis_server, "run"), RedisRetry(Stop(), Health())
    kept = KeptGroups(tmp_path / "run/checkpoints/groups")
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", 3, 10, signatures=make_signatures(tmp_path / "keys"))
    take_over(settings, checkpoints, kept, streams, retry, 0)
    saved = save_checkpoint(checkpoints, 5, lambda folder: None)
    take_over(settings, checkpoints, kept, streams, retry, 0)
    first, second = (json.loads(line) for line in audit.read_text().splitlines())
    assert (first["act"], first["actor"], first["run"], first["epoch"]) == ("start_run", "trainer", "run", 1)
    assert (second["act"], second["epoch"], second["step"]) == ("restore_checkpoint", 2, 5)
    assert second["folder"] == str(saved)
