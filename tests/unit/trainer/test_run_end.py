"""How a training ends is in the run's events."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from forage_records.events import read_events
from forage_runtime.errors import FencedError, RolledBackError
from forage_runtime.settings import load_settings
from forage_runtime.stop import Stopped
from forage_trainer.checkpoints.rollbacks import GuardStopError
from forage_trainer.run import _record_end


@pytest.mark.parametrize(
    ("error", "kind", "step", "text"),
    [
        (None, "end", 3, "3 steps"),
        (Stopped(), "stop", 3, "the trainer was asked to stop"),
        (RolledBackError("guard 'kl' at step 4: too high"), "rollback", 4, "guard 'kl' at step 4: too high"),
        (GuardStopError("guard 'kl' stopped the run"), "failure", 3, "guard 'kl' stopped the run"),
        (FencedError("a later trainer works"), "failure", 3, "a later trainer works"),
    ],
)
def test_every_end_is_an_event(tmp_path: Path, error: Exception | None, kind: str, step: int, text: str) -> None:
    audit = tmp_path / "audit.jsonl"
    settings = load_settings(None, [f"run.dir={tmp_path}", "run.id=r", f"security.audit_file={audit}"], {})
    settings.run.folder.mkdir()
    reached = types.SimpleNamespace(step=3)

    def train() -> None:
        with _record_end(settings, reached):  # type: ignore[arg-type]
            if error is not None:
                raise error

    if error is None:
        train()
    else:
        with pytest.raises(type(error)):
            train()
    assert [(event.kind, event.step, event.text) for event in read_events(settings.run.folder)] == [(kind, step, text)]
    acts = [json.loads(line) for line in audit.read_text().splitlines()] if audit.exists() else []
    expected = [("roll_back_run", "trainer", "r", 4, text)] if kind == "rollback" else []
    assert [(act["act"], act["actor"], act["run"], act["step"], act["reason"]) for act in acts] == expected
