"""The trainer's process is killed and started again: it resumes, and no group is lost or duplicated."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from trainer_process import BATCH, TrainerProcess

pytestmark = [pytest.mark.timeout(600)]
STEPS = 6


def test_a_killed_trainer_resumes_and_consumes_every_group_once(
    trainer: Callable[..., TrainerProcess],
) -> None:
    run = trainer("r", STEPS, "trainer.save_freq=2")
    killed = run.run_until(3)  # the checkpoint is of step 2: step 3 is taken again
    killed.kill()
    killed.wait()
    run.complete()

    assert list(run.consumed) == list(range(1, STEPS + 1))
    uids = [uid for uids in run.consumed.values() for uid in uids]
    assert len(uids) == len(set(uids)) == STEPS * BATCH
    assert run.streams.count_backlog(run.streams.trajectories) == 0
    assert run.streams.count_backlog(run.streams.prompts) == 0
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    for label, version in (("before", 0), ("after", STEPS)):
        result = json.loads((run.folder / "validation" / f"{label}.json").read_text())
        assert (result["version"], result["count"], result["failed"]) == (version, 5, 0)
    assert json.loads((run.folder / "state.json").read_text())["phase"] == "done"
