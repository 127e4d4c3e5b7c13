"""Probes in training of policies that are known: over a real HTTP server, gRPC and the real reward service."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from completions_server import ALPHABET, CompletionsServer, encode, serve_completions
from prometheus_client import REGISTRY
from rich.console import Console
from trainer_parts import ScriptedRollout, read_lines, write_model, write_questions

from forage_cli.local import serving
from forage_cli.local.stack import Program
from forage_common.errors import SettingsError
from forage_common.files.questions import Questions, read_questions
from forage_common.files.step_file import read_step, step_file_path
from forage_common.settings import RedisSettings, Settings, load_settings
from forage_common.stop import Stop, Stopped
from forage_common.streams.client import StreamClient
from forage_common.telemetry.health import Health
from forage_common.v1.rollout_pb2 import GetStatusRequest, GetStatusResponse, RunRequest, RunResponse
from forage_common.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from forage_common.v1.trajectory_pb2 import (
    ActionKind,
    Policy,
    PolicySegment,
    Prompt,
    Role,
    Score,
    Span,
    Status,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from forage_probe.contexts import CONNECTIVE
from forage_trainer.engine.policy_worker import PolicyWorker
from forage_trainer.loop import TrainingLoop
from forage_trainer.reporting.progress import StateFile
from forage_trainer.validation.probe import ValidationProbe

LENGTH = 20
POLICY = Policy(version=4, epoch=2)


def write_answer(context: str, right: bool) -> str:
    number = re.search(r"number (\d+)", context)
    assert number is not None
    return f" n{number[1]}</answer>" if right else " nothing</answer>"


def measure_kept_share(context: str) -> float:
    """Measure the share of the thought that the context keeps."""
    return context.rpartition("<think>")[2].removesuffix(CONNECTIVE).count(".") / LENGTH


def answer_by_kept_share(context: str, chance: random.Random) -> str:
    return write_answer(context, chance.random() < measure_kept_share(context))


def answer_early(context: str, chance: random.Random) -> str:
    """Answer correctly as long as less than half of the thought is kept."""
    return write_answer(context, measure_kept_share(context) < 0.5)


def build_trajectory(prompt: Prompt, sample: int, policy: Policy) -> Trajectory:
    """A search and an answer in tokens of single characters, rewarded by turns."""
    parts = [
        (Role.ROLE_PROMPT, prompt.messages[-1].content),
        (Role.ROLE_MODEL, "<think>hm</think> <search>it</search>"),
        (Role.ROLE_ENV, "\n<information>something</information>\n"),
        (Role.ROLE_MODEL, f"<think>{'.' * LENGTH}</think> <answer> nothing </answer>"),
    ]
    spans, ids, mask, turns = [], [], [], []
    for role, text in parts:
        spans.append(Span(role=role, begin=len(ids), end=len(ids) + len(text), text=text))
        ids += encode(text)
        if role != Role.ROLE_PROMPT:
            mask += [int(role == Role.ROLE_MODEL)] * len(text)
        if role == Role.ROLE_MODEL:
            kind = ActionKind.ACTION_KIND_ANSWER if "<answer>" in text else ActionKind.ACTION_KIND_SEARCH
            turns.append(Turn(index=len(turns) + 1, action=kind))
    reward = float((sample + prompt.batch) % 2)
    return Trajectory(
        id=f"{prompt.run_id}/{prompt.group_uid}/{sample}",
        run_id=prompt.run_id,
        group_uid=prompt.group_uid,
        sample=sample,
        data_source=prompt.data_source,
        ground_truth=prompt.ground_truth,
        token_ids=ids,
        prompt_length=spans[0].end,
        loss_mask=mask,
        turn_ids=[1 if one else -1 for one in mask],
        logprobs=[-5.0 if one else 0.0 for one in mask],
        segments=[PolicySegment(version=policy.version, epoch=policy.epoch, begin=0, end=len(mask))],
        spans=spans,
        turns=turns,
        status=Status.STATUS_OK,
        score=Score(status=Status.STATUS_OK, total=reward),
        validation_score=Score(status=Status.STATUS_OK, total=reward),
        finished=True,
    )


class Sampler(RolloutServicer):
    """Answers every prompt in the same way; keeps them."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.serving: Callable[[], Policy | None] = lambda: POLICY

    def Run(self, request: RunRequest, context: Any) -> RunResponse:  # the names are gRPC's
        self.prompts.append(request.prompt)
        samples = range(request.prompt.samples)
        return RunResponse(
            group=TrajectoryGroup(trajectories=[build_trajectory(request.prompt, i, POLICY) for i in samples])
        )

    def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:
        return GetStatusResponse(serving=self.serving())


class CharacterRollout(ScriptedRollout):
    """The rollout service on the streams, with such trajectories."""

    def _answer(self, prompt: Prompt, policy: Policy) -> TrajectoryGroup:
        group = super()._answer(prompt, policy)
        assert group is not None
        del group.trajectories[:]
        group.trajectories.extend(build_trajectory(prompt, i, policy) for i in range(prompt.samples))
        return group


def write_characters(folder: Path) -> Path:
    """A random policy whose tokenizer knows single characters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    write_model(folder)
    tokenizer = Tokenizer(models.WordLevel({character: number for number, character in enumerate(ALPHABET)}, " "))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]) -> Iterator[list[str]]:
    """The reward service, the policy and the questions; their settings."""
    folder = tmp_path_factory.mktemp("probing")
    overrides = [
        f"reward.grpc_address={free_address()}",
        f"reward.health_address={free_address()}",
        f"run.dir={folder / 'reward'}",
        f"model.path={write_characters(folder / 'model')}",
        f"data.train_files=[{write_questions(folder / 'train.parquet', 10)}]",
        f"data.val_files=[{write_questions(folder / 'test.parquet', 9, split='test')}]",
        "rollout.trajectory_timeout_s=5",
        "rollout.score_timeout_s=5",
    ]
    with serving.ensure_services(load_settings(None, overrides, {}), Console(quiet=True), (Program.REWARD,)):
        yield overrides


@pytest.fixture
def scripted() -> Iterator[CompletionsServer]:
    with serve_completions(answer_by_kept_share) as server:
        yield server


@pytest.fixture
def sampler() -> Iterator[tuple[Sampler, str]]:
    servicer, server = Sampler(), grpc.server(ThreadPoolExecutor(4))
    add_RolloutServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer, address
    server.stop(None)


@pytest.fixture
def settings(
    shared: list[str], scripted: CompletionsServer, sampler: tuple[Sampler, str], tmp_path: Path
) -> Callable[..., Settings]:
    def make(*overrides: str) -> Settings:
        own = [f"run.dir={tmp_path}", "run.id=r", f"rollout.http_address={scripted.address}"]
        own += [f"rollout.grpc_address={sampler[1]}", "trainer.probe.freq=2", "trainer.probe.trajectories=4"]
        return load_settings(None, [*shared, *own, *overrides], {})

    return make


def make_probe(settings: Settings) -> ValidationProbe:
    return ValidationProbe(settings, read_questions(settings.data.val_files).rows, StateFile(settings.run.folder))


def count_probes(purpose: str, outcome: str) -> float:
    labels = {"purpose": purpose, "outcome": outcome}
    return REGISTRY.get_sample_value("forage_trainer_probes_total", labels) or 0.0


def do_nothing() -> None:
    pass


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


def test_every_turn_can_be_probed_and_the_number_of_questions_bounds_the_probes(
    settings: Callable[..., Settings],
) -> None:
    every = ["trainer.probe.turn=any", "trainer.probe.trajectories=100", "trainer.probe.samples=2"]
    result = make_probe(settings(*every, "trainer.probe.points=1")).run(POLICY, do_nothing)
    assert (result["val-probe/count"], result["val-probe/failed"]) == (18, 0)


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


def test_a_probe_of_an_unavailable_service_ends_within_its_time_limit(settings: Callable[..., Settings]) -> None:
    before = count_probes("validation", "failed")
    unreachable = settings("rollout.http_address=127.0.0.1:9", "trainer.probe.timeout_s=1.5")
    began = time.monotonic()
    result = make_probe(unreachable).run(POLICY, do_nothing)
    assert time.monotonic() - began < 10
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
        from forage_common.files.questions import read_questions
        from forage_common.settings import load_settings
        from forage_common.v1.trajectory_pb2 import Policy
        from forage_trainer.reporting.progress import StateFile
        from forage_trainer.validation.probe import ValidationProbe
        settings = load_settings(Path(sys.argv[1]), (), {})
        rows = read_questions(settings.data.val_files).rows
        ValidationProbe(settings, rows, StateFile(settings.run.folder)).run(Policy(version=4, epoch=2), lambda: None)
    """
    scripted.delay_s = 0.3
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "settings.yaml")]) as process:
        deadline = time.monotonic() + 60
        while len(scripted.asked) < 6:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "r/probes").exists()
    scripted.delay_s = 0.0
    assert make_probe(own).run(POLICY, do_nothing)["val-probe/count"] == 4
    assert (tmp_path / "r/probes/step-4.json").exists()


class OneProcess:
    """The trainer's loop on these services."""

    def __init__(self, settings: Settings, redis: RedisSettings, sampler: Sampler) -> None:
        self._settings = settings
        self._redis = redis
        self.stop = Stop()
        sampler.serving = StreamClient(redis, settings.run.id).read_policy

    def run(self) -> None:
        settings = self._settings
        questions = read_questions(settings.data.train_paths), read_questions(settings.data.val_files)
        few = Questions(questions[1].rows[:2], questions[1].digest, {})
        streams = StreamClient(self._redis, settings.run.id)
        TrainingLoop(settings, streams, PolicyWorker(settings), questions[0], few, 0, self.stop, Health()).run()


SMALL = (
    "data.train_batch_size=2",
    "trainer.actor.ppo_mini_batch_size=2",
    "rollout.n=3",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=3",
    "trainer.threads=1",
    "trainer.save_freq=1",
    "trainer.rollout_data_freq=1",
    "trainer.probe.points=2",
    "trainer.probe.samples=4",
    "trainer.algorithm.probe_penalty.coef=2",
    "trainer.algorithm.probe_penalty.points=4",
    "trainer.algorithm.probe_penalty.samples=2",
)


def test_training_probes_policy_and_trajectories_and_repeats_a_stopped_probe(
    settings: Callable[..., Settings],
    scripted: CompletionsServer,
    sampler: tuple[Sampler, str],
    redis_server: RedisSettings,
) -> None:
    own = settings(*SMALL, f"redis.url={redis_server.url}")
    folder = own.run.folder
    player = CharacterRollout(redis_server, own.run.id)
    player.start()
    process = OneProcess(own, redis_server, sampler[0])

    def answer_and_stop(context: str, chance: random.Random) -> str:
        if (folder / "checkpoints/step_2").exists():
            process.stop.request()
            time.sleep(0.3)
        return answer_early(context, chance)

    scripted.policy = answer_and_stop
    try:
        with pytest.raises(Stopped):
            process.run()
        assert sorted(file.name for file in folder.glob("probes/*")) == ["step-0.json"]
        assert "val-probe/count" not in read_lines(folder / "metrics.jsonl")[1]
        scripted.policy = answer_early
        OneProcess(own, redis_server, sampler[0]).run()
    finally:
        player.end()
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sorted(file.name for file in folder.glob("probes/*")) == ["step-0.json", "step-2.json", "step-3.json"]
    assert [line.get("val-probe/count") for line in lines] == [None, 2, 2]
    # Right in none, half and all of the thought's absence: c = 1, 0, 0 and w = 0.5, 0, -0.5.
    assert lines[1]["val-probe/overconfidence/mean"] == 0.5
    assert [line["probe_overconfidence"] for line in lines] == pytest.approx([0.75] * 3)  # c = 1, 1, 0, 0, 0
    assert [line["probe_penalty"] for line in lines] == pytest.approx([1.5] * 3)
    assert [(line["probe_count"], line["probe_failed"]) for line in lines] == [(2, 0)] * 3
    assert all(line["seconds"]["probe"] > 0 for line in lines)
    rows = list(read_step(step_file_path(folder, 1)))
    assert [row.overconfidence for row in rows] == [0.75, None, None] * 2
    for probed, _, equal in (rows[:3], rows[3:]):
        assert probed.trajectory.score.total == equal.trajectory.score.total
        assert probed.advantages is not None
        assert equal.advantages is not None
        for own_value, other, state in zip(
            probed.advantages, equal.advantages, probed.trajectory.loss_mask, strict=True
        ):
            assert own_value == (pytest.approx(other - 1.5) if state else 0.0)
        assert probed.returns == equal.returns
