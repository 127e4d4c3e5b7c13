"""Run folders for the console, made with the writers of a training: settings, metrics, validations, steps, events.

`write_demo` is a run as `forage demo` leaves one, small and the same each time: a policy that learns to search. Its
texts can be replaced, for instance by hostile ones.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from google.protobuf.json_format import MessageToDict

from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    Component,
    Document,
    GroundTruth,
    PolicySegment,
    Role,
    Sampling,
    Score,
    Span,
    Status,
    Timings,
    Trajectory,
    Turn,
)
from forage_records.step_file import Fate, GroupFate, StepRow, step_file_path, write_step
from forage_runtime.settings import load_settings

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "models/tiny-policy"
END = "<|im_end|>"
CITIES = ("Kima Kieza", "Shahrud", "Bergen", "Ponta Grossa", "Turku", "Nara", "Cusco", "Gulu", "Tartu", "Iquique")
COUNTRIES = ("Angola", "Iran", "Norway", "Brazil", "Finland", "Japan", "Peru", "Uganda", "Estonia", "Chile")
CAPITALS = ("Luanda", "Tehran", "Oslo", "Brasília", "Helsinki", "Tokyo", "Lima", "Kampala", "Tallinn", "Santiago")
SAMPLES = 4
NOWHERE = (
    "redis.url=redis://127.0.0.1:1/0",
    "retriever.http_address=127.0.0.1:2",
    "retriever.grpc_address=127.0.0.1:3",
    "reward.grpc_address=127.0.0.1:4",
    "reward.health_address=127.0.0.1:5",
    "rollout.grpc_address=127.0.0.1:6",
    "rollout.health_address=127.0.0.1:7",
    "rollout.http_address=127.0.0.1:8",
    "trainer.health_address=127.0.0.1:9",
)
"""Addresses at which nothing listens: the services of a made run have never been."""


@dataclass(frozen=True)
class Question:
    """A question with what a policy may find and write."""

    text: str
    target: str
    query: str
    passages: tuple[tuple[str, str], ...]
    wrong: str = "Paris"
    thought: str = "look it up"


@dataclass(frozen=True)
class Demo:
    """What a made run has.

    Attributes:
        saved: steps with files; validated: steps after which there is a validation; watched: … of watched questions.
        began: Unix time of the first step; None: so that the last one was just taken.
    """

    steps: int = 40
    total: int = 40
    saved: Sequence[int] = (10, 20, 30, 40)
    validated: Sequence[int] = (20,)
    watched: Sequence[int] = (0, 10, 20, 30, 40)
    groups: int = 6
    seed: int = 0
    began: float | None = None
    settings: Sequence[str] = ()
    questions: Sequence[Question] = field(default_factory=lambda: list_questions())


def list_questions() -> list[Question]:
    """Questions of two hops about cities."""
    return [
        Question(
            f"What is the capital of the country where the city of {city} lies?",
            capital,
            city,
            ((city, f"{city} is a city in {country}."), (country, f"The capital of {country} is {capital}.")),
            CAPITALS[place - 1],
        )
        for place, (city, country, capital) in enumerate(zip(CITIES, COUNTRIES, CAPITALS, strict=True))
    ]


def write_demo(folder: Path, demo: Demo | None = None) -> Path:
    """Write a run; its trainer has ended where it took all its steps."""
    demo = demo or Demo()
    folder.mkdir(parents=True)
    own = [f"run.id={_choose_id(folder.name)}", f"run.seed={demo.seed}", f"model.path={MODEL}", *NOWHERE]
    settings = load_settings(REPOSITORY / "configs/demo.yaml", [*own, *demo.settings])
    (folder / "settings.yaml").write_text(settings.to_yaml())
    began = demo.began if demo.began is not None else time.time() - 5 * demo.steps
    write_validation(folder, "before", 0, [answer_greedily(demo, number, 0) for number in range(len(demo.questions))])
    for step in range(1, demo.steps + 1):
        append_step(folder, demo, step, began + 5 * step)
    for step in demo.validated:
        write_validation(folder, f"step-{step}", step, _validate(demo, step))
    for step in demo.watched:
        write_validation(folder, f"watch-{step}", step, _watch(demo, step))
    is_done = demo.steps == demo.total
    if is_done:
        write_validation(folder, "after", demo.total, _validate(demo, demo.total))
    write_state(folder, "done" if is_done else "training", demo.steps, demo.total)
    append_event(folder, began, "start", "a new run", 0)
    return folder


def _choose_id(name: str) -> str:
    """The id in the settings, which has fewer characters than a folder may."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def append_step(folder: Path, demo: Demo, step: int, now: float) -> None:
    """Write what a step leaves: its line, its file where it is saved, its events."""
    groups = list(_sample_groups(demo, step))
    rows = [row for group in groups for row in group]
    if step in demo.saved:
        fates = [
            GroupFate(group[0].trajectory.group_uid, place, 0, *_judge_group(group))
            for place, group in enumerate(groups)
        ]
        fates.append(GroupFate("", len(groups), 1, Fate.DROPPED, "it did not arrive in time"))
        write_step(step_file_path(folder, step), END, rows, fates)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(_measure(demo, step, rows, groups, now)) + "\n")
    if step % 20 == 0:
        append_event(folder, now, "checkpoint", f"step_{step}", step)


def append_event(folder: Path, now: float, kind: str, text: str, step: int | None, service: str = "trainer") -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": now, "kind": kind, "text": text, "step": step, "service": service}) + "\n")


def write_state(folder: Path, phase: str, done: int, total: int) -> None:
    state = {"phase": phase, "detail": f"{total} steps" if phase == "done" else f"step {done + 1}"}
    (folder / "state.json").write_text(json.dumps(state | {"done": done, "total": total}))


def write_validation(folder: Path, label: str, version: int, records: Sequence[dict[str, Any]]) -> None:
    """Write a validation as the trainer does: first its answers, then its summary."""
    target = folder / "validation"
    target.mkdir(exist_ok=True)
    judged = [record["em"] for record in records if record["em"] is not None]
    by_source = {f"em/{record['data_source']}": fmean(judged) if judged else None for record in records[:1]}
    summary = {"label": label, "version": version, "epoch": 1, "em": fmean(judged) if judged else None} | by_source
    counts = {"count": len(records), "failed": len(records) - len(judged), "search_rate": 0.5, "seconds": 4.0}
    (target / f"{label}.jsonl").write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    (target / f"{label}.json").write_text(json.dumps(summary | counts))


def answer_greedily(demo: Demo, number: int, version: int, split: str = "test") -> dict[str, Any]:
    """The record of a question in a validation under a version of the policy."""
    chance = random.Random(f"{demo.seed} {split} {number}")
    learned = chance.random() < version / demo.total
    built = build_trajectory(
        demo.questions[number], "search" if learned else "guess", f"world_facts/{split}/{number}/0", 0
    )
    score = built.score
    return {
        "uid": built.group_uid,
        "data_source": "world_facts",
        "question": demo.questions[number].text,
        "targets": [demo.questions[number].target],
        "failed": False,
        "em": built.validation_score.total,
        "reward": score.total,
        "reward_name": score.reward,
        "components": [{"name": c.name, "raw": c.raw, "weighted": c.weighted} for c in score.components],
        "detail": score.detail,
        "status": "OK",
        "reason": None,
        "answer": built.turns[-1].content,
        "finished": True,
        "truncated": False,
        "searches": built.valid_searches,
        "response_tokens": len(built.loss_mask),
        "sample": 0,
        "policy_version": version,
        "policy_version_min": version,
        "trace_id": "",
        "spans": [{"role": Role.Name(s.role).removeprefix("ROLE_").lower(), "text": s.text} for s in built.spans],
        "turns": [MessageToDict(turn, preserving_proto_field_name=True) for turn in built.turns],
    }


def build_trajectory(question: Question, behaviour: str, uid: str, sample: int, version: int = 0) -> Trajectory:
    """Build a trajectory whose policy searches twice and is right, searches once and is wrong, guesses, or fails."""
    texts: list[tuple[Role, str]] = [
        (
            Role.ROLE_PROMPT,
            f"<|im_start|>user\nAnswer the given question. Question: {question.text}\n{END}\n<|im_start|>assistant\n",
        )
    ]
    turns: list[Turn] = []
    queries = {"search": [question.query, question.passages[-1][0]], "wrong": [question.query]}.get(behaviour, [])
    for index, query in enumerate(queries, 1):
        documents = [
            Document(id=f"world-{place:05}", contents=f'"{title}"\n{text}', score=0.5 / place)
            for place, (title, text) in enumerate(question.passages, 1)
        ]
        found = "\n".join(f'Doc {n}(Title: "{t}") {text}' for n, (t, text) in enumerate(question.passages, 1))
        texts.append((Role.ROLE_MODEL, f"<think> {question.thought} </think> <search> {query} </search>"))
        texts.append((Role.ROLE_ENV, f"\n\n<information>{found}</information>\n\n"))
        turns.append(
            Turn(
                index=index,
                action=ActionKind.ACTION_KIND_SEARCH,
                content=query,
                executed=True,
                documents=documents,
                retrieval_status=Status.STATUS_OK,
                tag="search",
            )
        )
    is_right = behaviour == "search"
    answer = question.target if is_right else question.wrong
    last = f"<think> {'found it' if queries else 'I know it'} </think> <answer> {answer} </answer>{END}"
    texts.append((Role.ROLE_MODEL, last if behaviour != "rambling" else "<think> I wonder and wonder and wonder"))
    if behaviour != "rambling":
        turns.append(Turn(index=len(queries) + 1, action=ActionKind.ACTION_KIND_ANSWER, content=answer, tag="answer"))
    else:
        turns.append(Turn(index=1, action=ActionKind.ACTION_KIND_INVALID))
    failed = behaviour == "failed"
    status = Status.STATUS_TIMEOUT if failed else Status.STATUS_OK
    has_format = behaviour != "rambling"
    score = Score(
        status=status,
        total=1.0 if is_right else 0.2 * has_format,
        components=[
            Component(name="exact_match", raw=is_right, weighted=0.8 * is_right),
            Component(name="format", raw=has_format, weighted=0.2 * has_format),
        ],
        reward="search_r1_format",
        detail="the answer is one of the targets" if is_right else "the answer is none of the targets",
    )
    built = Trajectory(
        id=f"run/{uid}/{sample}",
        run_id="run",
        group_uid=uid,
        sample=sample,
        data_source="world_facts",
        turns=turns,
        score=score,
        validation_score=Score(status=status, total=float(is_right)),
        finished=has_format,
        truncated=not has_format,
        valid_actions=len(turns),
        valid_searches=len(queries),
        status=status,
        status_detail="the retriever did not answer in 30 s" if failed else "",
        timings=Timings(queued_s=0.1, generate_s=0.6, retrieve_s=0.05 * len(queries), score_s=0.01, total_s=0.8),
        trace_id="",
        replica="engine-0",
        ground_truth=GroundTruth(targets=[question.target]),
        sampling=Sampling(temperature=1.0, seed=sample + 1),
    )
    _add_tokens(built, texts, version)
    return built


def _add_tokens(built: Trajectory, texts: Sequence[tuple[Role, str]], version: int) -> None:
    turn = 0
    for role, text in texts:
        ids, begin = encode(text), len(built.token_ids)
        built.token_ids.extend(ids)
        built.spans.append(Span(role=role, begin=begin, end=begin + len(ids), text=text))
        if role == Role.ROLE_PROMPT:
            built.prompt_length = len(ids)
            continue
        own = role == Role.ROLE_MODEL
        turn += own
        chance = random.Random(f"{built.id} {begin}")
        built.loss_mask.extend([int(own)] * len(ids))
        built.turn_ids.extend([turn if own else -1] * len(ids))
        built.logprobs.extend(-chance.expovariate(3) if own else 0.0 for _ in ids)
    middle = len(built.loss_mask) // 2
    built.segments.append(PolicySegment(version=max(0, version - 1), epoch=1, begin=0, end=middle))
    built.segments.append(PolicySegment(version=version, epoch=1, begin=middle, end=len(built.loss_mask)))


@cache
def encode(text: str) -> tuple[int, ...]:
    """Tokens of the shipped policy for a text: the longest that fit, which need not be those of its tokenizer."""
    vocabulary, longest = _read_vocabulary()
    known = "".join(_byte_characters()[byte] for byte in text.encode())
    ids, place = [], 0
    while place < len(known):
        size = next((n for n in range(longest, 1, -1) if known[place : place + n] in vocabulary), 1)
        ids.append(vocabulary.get(known[place : place + size], 0))
        place += size
    return tuple(ids)


@cache
def _read_vocabulary() -> tuple[dict[str, int], int]:
    content = json.loads((MODEL / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    return vocabulary, min(24, max(map(len, vocabulary)))


@cache
def _byte_characters() -> dict[int, str]:
    """The character that a byte-level vocabulary has for each byte, as in GPT-2's table."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(shown))
    return {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def _validate(demo: Demo, step: int) -> list[dict[str, Any]]:
    return [answer_greedily(demo, number, step) for number in range(len(demo.questions))]


def _watch(demo: Demo, step: int) -> list[dict[str, Any]]:
    return [answer_greedily(demo, number, step, "train") for number in range(min(4, len(demo.questions)))]


def _sample_groups(demo: Demo, step: int) -> Iterator[list[StepRow]]:
    for position in range(demo.groups):
        number = (step * demo.groups + position) % len(demo.questions)
        uid = f"world_facts/train/{number}/{step * demo.groups // len(demo.questions)}"
        chance = random.Random(f"{demo.seed} {step} {position}")
        behaviours = [_choose_behaviour(chance, step / demo.total) for _ in range(SAMPLES)]
        if position == 1 and step % 10 == 0:
            behaviours = ["failed"] * SAMPLES
        group = [
            build_trajectory(demo.questions[number], b, uid, sample, step - 1) for sample, b in enumerate(behaviours)
        ]
        yield list(_estimate(group, step, chance))


def _choose_behaviour(chance: random.Random, progress: float) -> str:
    drawn = chance.random()
    if drawn < 0.15 + 0.75 * progress:
        return "search"
    return "rambling" if drawn > 0.97 else chance.choice(["wrong", "guess"])


def _estimate(group: Sequence[Trajectory], step: int, chance: random.Random) -> Iterator[StepRow]:
    """The rows of a group, with advantages as GRPO estimates them."""
    valid = [one.score.total for one in group if one.status == Status.STATUS_OK]
    mean, deviation = (fmean(valid), pstdev(valid)) if valid else (0.0, 0.0)
    for one in group:
        if one.status != Status.STATUS_OK:
            yield StepRow(one, step, step - 1, trained=False, reason="failed: the retriever did not answer in 30 s")
            continue
        advantage = (one.score.total - mean) / (deviation + 1e-6)
        mask = list(one.loss_mask)
        ours = [value + chance.gauss(0, 0.01) if own else 0.0 for value, own in zip(one.logprobs, mask, strict=True)]
        advantages = [advantage * own for own in mask]
        yield StepRow(
            one,
            step,
            step - 1,
            trained=True,
            loss_mask=mask,
            returns_sum=sum(advantages),
            advantages=advantages,
            returns=advantages,
            token_rewards=[0.0] * (len(mask) - 1) + [one.score.total],
            log_probs=ours,
            engine_log_probs=list(one.logprobs),
            reference_log_probs=[
                value + chance.gauss(0, 0.05) if own else 0.0 for value, own in zip(ours, mask, strict=True)
            ],
            entropies=[chance.expovariate(2) for _ in mask],
        )


def _judge_group(group: Sequence[StepRow]) -> tuple[Fate, str]:
    if not any(row.trained for row in group):
        return Fate.DEAD, f"0 of {len(group)} trajectories are valid"
    return Fate.TRAINED, ""


def _measure(
    demo: Demo, step: int, rows: Sequence[StepRow], groups: Sequence[Sequence[StepRow]], now: float
) -> dict[str, Any]:
    own = [row.trajectory for row in rows if row.trajectory.status == Status.STATUS_OK]
    chance = random.Random(f"{demo.seed} {step}")
    mean: Callable[[Callable[[Trajectory], float]], float] = lambda value: fmean(map(value, own))  # noqa: E731
    rewards = [one.score.total for one in own]
    wait = 1.5 * chance.random()
    seconds = {
        "wait": wait,
        "logp": 0.0,
        "ref": 0.5,
        "update": 2.0,
        "publish": 0.1,
        "checkpoint": 0.1,
        "total": wait + 2.7,
    }
    return {
        "step": step,
        "total_steps": demo.total,
        "reward_mean": fmean(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "em_mean": mean(lambda one: one.validation_score.total),
        "search_rate": mean(lambda one: float(one.valid_searches > 0)),
        "searches_mean": mean(lambda one: one.valid_searches),
        "format_rate": mean(lambda one: float(one.finished)),
        "finished_rate": mean(lambda one: float(one.finished)),
        "truncated_rate": mean(lambda one: float(one.truncated)),
        "turns_mean": mean(lambda one: len(one.turns)),
        "response_tokens_mean": mean(lambda one: len(one.loss_mask)),
        "response_tokens_max": max(len(one.loss_mask) for one in own),
        "prompt_tokens_mean": mean(lambda one: one.prompt_length),
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "trajectories": len(rows),
        "failed": len(rows) - len(own),
        "tokens": sum(len(one.token_ids) for one in own),
        "dead_groups": sum(not any(row.trained for row in group) for group in groups),
        "filtered_groups": 0,
        "dropped_stale": 0,
        "dropped_stragglers": 1,
        "refilled_groups": 0,
        "advantage_abs_mean": 0.6,
        "logprob_diff_mean": 1e-7 * (1 + chance.random()),
        "mismatch_mean": 2e-4 * (1 + chance.random()),
        "mismatch_max": 0.1,
        "mismatch_kl": 7e-6,
        "kl_ref": 0.06 * step / demo.total,
        "entropy": 0.4 - 0.3 * step / demo.total,
        "grad_norm": 0.2 + 0.2 * chance.random(),
        "loss": -0.05 + 0.02 * chance.random(),
        "lr": 1.5e-4,
        "tokens_digest": f"tokens {demo.seed} {step}",
        "weights_digest": f"weights {demo.seed} {step}",
        "guards": ["entropy"] if step == 33 else [],
        "seconds": seconds,
        "tokens_per_s": 2500 + 300 * chance.random(),
        "time": now,
    }
