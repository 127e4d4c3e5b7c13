"""Policies whose probes are known, over a real HTTP server, gRPC and the real reward service."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from completions_server import ALPHABET, CompletionsServer, encode, serve_completions
from prometheus_client import REGISTRY
from rich.console import Console
from trainer_parts import ScriptedRollout, write_model, write_questions

from forage_cli.local import serving
from forage_cli.local.stack import Program
from forage_probe.contexts import CONNECTIVE
from forage_proto.v1.rollout_pb2 import GetStatusRequest, GetStatusResponse, RunRequest, RunResponse
from forage_proto.v1.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from forage_proto.v1.trajectory_pb2 import (
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
from forage_records.questions import read_questions
from forage_runtime.settings import Settings, load_settings
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


@pytest.fixture(scope="session")
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
        "rollout.trajectory_timeout_s=120",
        "rollout.score_timeout_s=120",
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
    shared: list[str],
    scripted: CompletionsServer,
    sampler: tuple[Sampler, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Settings]:
    monkeypatch.setattr("forage_trainer.validation.prober._PAUSE_S", 0.05)
    monkeypatch.setattr("forage_trainer.validation.prober.POLL_INTERVAL_S", 0.05)

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
