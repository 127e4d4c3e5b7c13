"""Probes of held-out questions: of a known policy, over a real HTTP server, gRPC and the real reward service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from completions_server import CompletionsServer
from probing_parts import (
    POLICY,
    Sampler,
    count_probes,
    do_nothing,
    make_probe,
    sampler,
    scripted,
    settings,
    shared,
)
from prometheus_client import REGISTRY
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings

__all__ = ["sampler", "scripted", "settings", "shared"]


def test_held_out_questions_are_answered_greedily_and_probed_and_the_result_is_stored(
    settings: Callable[..., Settings], scripted: CompletionsServer, sampler: tuple[Sampler, str], tmp_path: Path
) -> None:
    probe = make_probe(settings())
    assert probe.run(Policy(version=3, epoch=2), do_nothing) == {}
    assert scripted.asked == []
    result = probe.run(POLICY, do_nothing)
    assert (result["val-probe/count"], result["val-probe/failed"]) == (4, 0)
    assert [result[f"val-probe/confidence@{k}"] for k in range(11)] == pytest.approx(
        [k / 10 for k in range(11)], abs=0.1
    )
    assert result["val-probe/spearman/mean"] > 0.95
    assert result["val-probe/premature/share"] == 0.0
    assert result["val-probe/overconfidence/mean"] == pytest.approx(-1.1, abs=0.1)
    assert result["val-probe/aoc/mean"] == pytest.approx(0.5, abs=0.1)
    assert {(p.sampling.temperature, p.samples) for p in sampler[0].prompts} == {(0.0, 1)}
    assert REGISTRY.get_sample_value("forage_trainer_probe", {"metric": "confidence@10"}) == 1.0
    stored = json.loads((tmp_path / "r/probes/step-4.json").read_text())
    assert stored["figures"] == result
    assert (stored["version"], stored["plan"]["samples"], stored["sets"]["all"]["count"]) == (4, 50, 4)
    assert stored["sets"]["incorrect"]["confidence_at"][-1] == 1.0
    assert not list((tmp_path / "r").glob("validation/*"))
    # A restarted trainer reads it, and a later policy is asked the same questions.
    asked = len(scripted.asked)
    assert make_probe(settings()).run(POLICY, do_nothing) == result
    assert len(scripted.asked) == asked
    sampler[0].serving = lambda: Policy(version=6, epoch=2)
    assert probe.run(Policy(version=6, epoch=2), do_nothing)["val-probe/count"] == 4
    uids = [prompt.group_uid for prompt in sampler[0].prompts]
    assert sorted(uids[:4]) == sorted(uids[4:])


def test_no_more_questions_are_probed_than_there_are(
    settings: Callable[..., Settings],
) -> None:
    every = ["trainer.probe.trajectories=100", "trainer.probe.samples=2", "trainer.probe.points=1"]
    result = make_probe(settings(*every)).run(POLICY, do_nothing)
    assert (result["val-probe/count"], result["val-probe/failed"]) == (9, 0)


def test_a_probe_waits_until_its_policy_is_served(
    settings: Callable[..., Settings], sampler: tuple[Sampler, str], scripted: CompletionsServer
) -> None:
    served = [Policy(version=9, epoch=1), Policy(version=3, epoch=2), POLICY]
    sampler[0].serving = lambda: served.pop(0) if len(served) > 1 else served[0]
    result = make_probe(settings("trainer.probe.points=1", "trainer.probe.samples=2")).run(POLICY, do_nothing)
    assert result["val-probe/count"] == 4
    assert served == [POLICY]


def test_transient_failures_are_retried_and_others_are_counted(
    settings: Callable[..., Settings], scripted: CompletionsServer, tmp_path: Path
) -> None:
    small = ["trainer.probe.points=1", "trainer.probe.samples=2"]
    scripted.failures = [503, 500, 400]
    before = count_probes("validation", "failed")
    result = make_probe(settings(*small)).run(POLICY, do_nothing)
    # The connective is asked for first, and refused once; the second attempt finds all of it.
    assert (result["val-probe/count"], result["val-probe/failed"]) == (4, 0)
    scripted.failures = [400] * 100
    result = make_probe(settings(*small, "run.id=refused")).run(POLICY, do_nothing)
    assert result == {"val-probe/count": 0, "val-probe/failed": 4, "val-probe/seconds": result["val-probe/seconds"]}
    assert count_probes("validation", "failed") - before == 4
    assert not (tmp_path / "refused/probes").exists(), "a probe without results is repeated"


def test_a_probe_of_an_unavailable_service_ends_within_its_time_limit(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forage_trainer.validation.prober._PAUSE_S", 3600.0)  # between two attempts
    before = count_probes("validation", "failed")
    unreachable = settings("rollout.http_address=127.0.0.1:9", "trainer.probe.timeout_s=0.5")
    result = make_probe(unreachable).run(POLICY, do_nothing)
    assert result["val-probe/failed"] == 4
    assert count_probes("validation", "failed") - before == 4
    with pytest.raises(SettingsError, match="auth_token_file"):
        make_probe(settings("rollout.auth_token_file=/missing"))


def test_a_killed_probe_is_repeated(
    settings: Callable[..., Settings], scripted: CompletionsServer, tmp_path: Path
) -> None:
    own = settings("trainer.probe.points=3", "trainer.probe.samples=2")
    (tmp_path / "settings.yaml").write_text(own.to_yaml())
    script = """if True:
        import sys
        from pathlib import Path
        from forage_records.questions import read_questions
        from forage_runtime.settings import load_settings
        from forage_proto.v1.trajectory_pb2 import Policy
        from forage_trainer.reporting.progress import StateFile
        from forage_trainer.validation.probe import ValidationProbe
        settings = load_settings(Path(sys.argv[1]), (), {})
        rows = read_questions(settings.data.val_files).rows
        ValidationProbe(settings, rows, StateFile(settings.run.folder)).run(Policy(version=4, epoch=2), lambda: None)
    """
    scripted.delay_s = 0.3
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "settings.yaml")]) as process:
        wait_until(lambda: len(scripted.asked) >= 6 or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "r/probes").exists()
    scripted.delay_s = 0.0
    assert make_probe(own).run(POLICY, do_nothing)["val-probe/count"] == 4
    assert (tmp_path / "r/probes/step-4.json").exists()
