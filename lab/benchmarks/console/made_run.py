"""A made run as a long training leaves it: step files with many long trajectories, metrics, settings and a tokenizer.

Trajectories are put together from pools of made texts, whose words follow Zipf's law; every text has a word that few
others have. All trajectories but one have 2,000 tokens in the response; one has 32,000.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    Component,
    Document,
    GroundTruth,
    PolicySegment,
    Role,
    Score,
    Span,
    Status,
    Timings,
    Trajectory,
    Turn,
)
from forage_records.step_file import StepRow, step_file_path, write_step
from forage_runtime.settings import Settings

SAMPLES = 8
ROWS_OF_FILE = 2000
ROWS_OF_GROUP = 80
"""What `TrajectoryWriter` puts into a group of rows of this length."""
TOKENS, LONG_TOKENS = 2000, 32_000
END = "<|im_end|>"
COMMON, RARE, PHRASE = "ta", "rarity7", "found the answer"
"""A word of nearly every text, one of a few in a thousand, and words that follow each other in every text."""
_WORDS = 30_000
_VARIANTS = 500
_SEARCHES = 4
_THINK, _PASSAGES = 60, 420
_PROMPT = 40
_FORMAT = "2"
_CHARS = "aeioubcdfghklmnprstvz"


@dataclass(frozen=True)
class Piece:
    """A turn at one place of a trajectory: the message's fields, its text, and who wrote its tokens."""

    message: bytes
    text: str


def make_run(folder: Path, trajectories: int) -> Path:
    """Make the run, or return the one that is there: (folder of the runs) / made."""
    run = folder / "made"
    stamp = run / ".made"
    wanted = f"{_FORMAT} {trajectories}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return run
    shutil.rmtree(run, ignore_errors=True)
    (run / "trajectories").mkdir(parents=True)
    vocabulary = _make_vocabulary()
    _write_tokenizer(run / "model", vocabulary)
    settings = Settings().to_yaml().replace("run:\n", "run:\n", 1)
    (run / "settings.yaml").write_text(settings, encoding="utf-8")
    maker = _Maker(vocabulary)
    steps = -(-trajectories // ROWS_OF_FILE)
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            rows = min(ROWS_OF_FILE, trajectories - (step - 1) * ROWS_OF_FILE)
            maker.write_file(step_file_path(run, step), step, rows)
            reward = 0.2 + 0.5 * step / steps
            metrics.write(json.dumps({"step": step, "total_steps": steps, "reward_mean": reward}) + "\n")
    write_step(step_file_path(run, steps + 1), END, [maker.make_long(steps + 1)])
    metrics_line = {"step": steps + 1, "total_steps": steps + 1, "reward_mean": 1.0}
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(metrics_line) + "\n")
    stamp.write_text(wanted, encoding="utf-8")
    return run


def _make_vocabulary() -> list[str]:
    """Words by rank: common ones are short. The first is in nearly every text."""
    generator = np.random.default_rng(1)
    words = [COMMON, "found", "the", "answer"]
    seen = set(words)
    while len(words) < _WORDS:
        length = min(9, 2 + int(np.log2(1 + len(words) / 40)) + int(generator.integers(0, 2)))
        word = "".join(_CHARS[i] for i in generator.integers(0, len(_CHARS), length))
        if word not in seen:
            seen.add(word)
            words.append(word)
    return words + [f"rarity{number}" for number in range(_VARIANTS)]


def _write_tokenizer(folder: Path, vocabulary: list[str]) -> None:
    folder.mkdir()
    vocab = {"▁" + word: number for number, word in enumerate(vocabulary)}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocab}, "added_tokens": []}), encoding="utf-8"
    )
    (folder / "config.json").write_text("{}", encoding="utf-8")


class _Maker:
    """Puts trajectories together from pools of pieces."""

    def __init__(self, vocabulary: list[str]) -> None:
        self._random = np.random.default_rng(2)
        self._words = np.array(vocabulary)
        weights = 1 / np.arange(1, _WORDS + 1)
        self._weights = np.cumsum(weights / weights.sum())
        self._turns = [
            [self._make_search(place, variant) for variant in range(_VARIANTS)] for place in range(1, _SEARCHES + 1)
        ]
        self._prompts = [self._make_text(_PROMPT - 1) for _ in range(_VARIANTS)]
        answer_tokens = TOKENS - _SEARCHES * (_THINK + _PASSAGES)
        self._answers = [self._make_answer(answer_tokens) for _ in range(_VARIANTS)]
        own = np.concatenate([np.ones(_THINK), np.zeros(_PASSAGES)])
        self._mask = np.concatenate([np.tile(own, _SEARCHES), np.ones(answer_tokens)]).astype(np.uint8)

    def _draw(self, count: int) -> np.ndarray:
        ids: np.ndarray = np.searchsorted(self._weights, self._random.random(count)).clip(0, _WORDS - 1)
        return ids

    def _make_text(self, count: int) -> tuple[list[int], str]:
        ids = self._draw(count)
        return ids.tolist(), "".join(" " + word for word in self._words[ids])

    def _make_search(self, place: int, variant: int) -> Piece:
        """The place-th search: a thought, a query and passages; the response's tokens begin after the prompt's."""
        begin = _PROMPT + (place - 1) * (_THINK + _PASSAGES)
        thought, thought_text = self._make_text(_THINK)
        passages, passages_text = self._make_text(_PASSAGES - 1)
        passages.append(_WORDS + variant)
        passages_text += f" rarity{variant}"
        third = len(passages_text) // 3
        documents = [
            Document(id=f"d{variant}-{i}", contents=f'"Title {variant}"\n{passages_text[i * third : (i + 1) * third]}')
            for i in range(3)
        ]
        query = thought_text[-40:].strip()
        turn = Turn(
            index=place, action=ActionKind.ACTION_KIND_SEARCH, content=query, executed=True, documents=documents,
            retrieval_status=Status.STATUS_OK, tag="search",
        )  # fmt: skip
        middle, end = begin + _THINK, begin + _THINK + _PASSAGES
        model = f"<think>{thought_text}</think> <search> {query} </search>"
        env = f"\n\n<information>{passages_text}</information>\n\n"
        message = Trajectory(
            token_ids=thought + passages,
            loss_mask=[1] * _THINK + [0] * _PASSAGES,
            turn_ids=[place] * _THINK + [-1] * _PASSAGES,
            logprobs=[*(-self._random.random(_THINK)).tolist(), *[0.0] * _PASSAGES],
            spans=[
                Span(role=Role.ROLE_MODEL, begin=begin, end=middle, text=model),
                Span(role=Role.ROLE_ENV, begin=middle, end=end, text=env),
            ],
            turns=[turn],
        )
        return Piece(message.SerializeToString(), model + env)

    def _make_answer(self, count: int) -> Piece:
        begin = _PROMPT + _SEARCHES * (_THINK + _PASSAGES)
        thought, text = self._make_text(count - 3)
        text = f"<think>{text} found the answer</think> <answer> {text[-20:].strip()} </answer>"
        turn = Turn(index=_SEARCHES + 1, action=ActionKind.ACTION_KIND_ANSWER, content=text[-20:], tag="answer")
        message = Trajectory(
            token_ids=[*thought, 1, 2, 3],
            loss_mask=[1] * count,
            turn_ids=[_SEARCHES + 1] * count,
            logprobs=(-self._random.random(count)).tolist(),
            spans=[Span(role=Role.ROLE_MODEL, begin=begin, end=begin + count, text=text)],
            turns=[turn],
            segments=[PolicySegment(version=1, begin=0, end=TOKENS)],
        )
        return Piece(message.SerializeToString(), text)

    def write_file(self, file: Path, step: int, rows: int) -> None:
        """Write a step file, group of rows by group of rows."""
        template = file.with_suffix(".template")
        write_step(template, END, [_make_small(step)])
        schema = pq.read_schema(template)
        template.unlink()
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for begin in range(0, rows, ROWS_OF_GROUP):
                writer.write_table(self._make_table(schema, step, begin, min(rows, begin + ROWS_OF_GROUP)))

    def _make_table(self, schema: pa.Schema, step: int, begin: int, end: int) -> pa.Table:
        made = [self._make_row(step, number) for number in range(begin, end)]
        columns = {name: [row[name] for row in made] for name in made[0]}
        lists = self._make_lists(np.array(columns["advantage_mean"], dtype=np.float64))
        count = end - begin
        arrays = []
        for field in schema:
            if field.name in lists:
                arrays.append(lists[field.name].cast(field.type))
            elif field.name in columns:
                arrays.append(pa.array(columns[field.name], field.type))
            else:
                arrays.append(pa.nulls(count, field.type))
        return pa.Table.from_arrays(arrays, schema=schema)

    def _make_lists(self, advantages: np.ndarray) -> dict[str, pa.ListArray]:
        rows = len(advantages)
        offsets = np.arange(0, (rows + 1) * TOKENS, TOKENS, dtype=np.int32)
        mask = np.tile(self._mask, rows)
        trained = advantages.repeat(TOKENS).astype(np.float32) * mask
        sampled = (-self._random.exponential(0.3, rows * TOKENS)).astype(np.float32) * mask
        # Half of the mantissa: files of a tenth of the disk, which are read as fast.
        sampled = (sampled.view(np.uint32) & 0xFFFFF000).view(np.float32)
        values = {
            "loss_mask": mask,
            "advantages": trained,
            "returns": trained,
            "log_probs": sampled,
            "engine_log_probs": sampled * np.float32(1.001),
            "reference_log_probs": sampled * np.float32(0.9),
            "entropies": -sampled,
        }
        return {name: pa.ListArray.from_arrays(offsets, value) for name, value in values.items()}

    def _make_row(self, step: int, number: int) -> dict[str, object]:
        draw = self._random.integers(0, _VARIANTS, _SEARCHES + 1)
        group, sample = divmod(number, SAMPLES)
        ids, question = self._prompts[(step * 131 + group) % _VARIANTS]
        source = ("nq", "hotpotqa", "musique")[group % 3]
        index = (step * 250 + group) % 20_000
        uid = f"{source}/train/{index}/{step // 80}"
        failed = number % 97 == 0
        right = self._random.random() < 0.3 + 0.002 * step
        reward = None if failed else (1.0 if right else 0.2 if number % 3 else 0.0)
        pieces = [turns[i] for turns, i in zip(self._turns, draw, strict=False)] + [self._answers[draw[-1]]]
        question = f"{question} q{step}x{group}?"
        prompt = f"Question:{question}{END}\n"
        status = Status.STATUS_TIMEOUT if failed else Status.STATUS_OK
        own = Trajectory(
            id=f"made/{uid}/{sample}", run_id="made", group_uid=uid, sample=sample, data_source=source,
            token_ids=[0, *ids], prompt_length=_PROMPT,
            spans=[Span(role=Role.ROLE_PROMPT, begin=0, end=_PROMPT, text=prompt)],
        )  # fmt: skip
        rest = Trajectory(
            score=Score(status=status, total=reward or 0.0, reward="made", components=_components(reward)),
            validation_score=Score(status=status, total=float(right), reward="exact_match"),
            finished=not failed, truncated=number % 31 == 0, valid_searches=_SEARCHES, valid_actions=_SEARCHES + 1,
            status=status, status_detail="the reward did not answer in time" if failed else "",
            timings=Timings(queued_s=0.1, generate_s=4.0, retrieve_s=0.4, score_s=0.01, total_s=4.51),
            ground_truth=GroundTruth(targets=["ta"]),
        )  # fmt: skip
        advantage = None if failed else float(self._random.normal())
        return {
            "id": own.id, "run_id": "made", "group_uid": uid, "sample": sample, "data_source": source,
            "question": question.strip(), "prompt": prompt, "response": "".join(piece.text for piece in pieces),
            "answer": pieces[-1].text[-29:-10], "targets": ["ta"],
            "status": Status.Name(status).removeprefix("STATUS_"),
            "reason": "failed: the reward did not answer in time" if failed else None, "reward": "made",
            "score": reward, "em": None if failed else float(right), "components": [],
            "turns": _SEARCHES + 1, "searches": number % (_SEARCHES + 1), "finished": not failed,
            "truncated": number % 31 == 0, "response_tokens": TOKENS, "policy_version": step - 1,
            "policy_version_min": max(0, step - 2), "step": step, "version": step - 1, "trained": not failed,
            "advantage_mean": advantage or 0.0, "search_advantage": advantage,
            "mismatch_max": abs(advantage or 0) / 100,
            "trajectory": b"".join([own.SerializeToString(), *(p.message for p in pieces), rest.SerializeToString()]),
        }  # fmt: skip

    def make_long(self, step: int) -> StepRow:
        """The long trajectory: one turn that goes on and on."""
        ids, text = self._make_text(LONG_TOKENS)
        log_probs = (-self._random.exponential(0.3, LONG_TOKENS)).tolist()
        advantages = np.sin(np.arange(LONG_TOKENS) / 50).tolist()
        trajectory = _make_small(step).trajectory
        del trajectory.spans[:], trajectory.token_ids[:]
        trajectory.MergeFrom(
            Trajectory(
                token_ids=[0, *ids], prompt_length=1, loss_mask=[1] * LONG_TOKENS, turn_ids=[1] * LONG_TOKENS,
                logprobs=log_probs, segments=[PolicySegment(version=step - 1, begin=0, end=LONG_TOKENS)],
                spans=[
                    Span(role=Role.ROLE_PROMPT, begin=0, end=1, text="Question: What is long?" + END),
                    Span(role=Role.ROLE_MODEL, begin=1, end=LONG_TOKENS + 1, text=text),
                ],
            )
        )  # fmt: skip
        return StepRow(
            trajectory, step, step - 1, True, [1] * LONG_TOKENS, 1.0, advantages, advantages, [0.0] * LONG_TOKENS,
            log_probs, [value * 1.001 for value in log_probs], log_probs, None, None, [-value for value in log_probs],
        )  # fmt: skip


def _make_small(step: int) -> StepRow:
    score = Score(status=Status.STATUS_OK, total=1.0, reward="made")
    trajectory = Trajectory(
        id="made/nq/train/long/0/0", run_id="made", group_uid="nq/train/long/0", data_source="nq",
        status=Status.STATUS_OK, score=score, validation_score=score, finished=True,
        ground_truth=GroundTruth(targets=["ta"]),
    )  # fmt: skip
    return StepRow(trajectory, step, step - 1, True)


def _components(reward: float | None) -> Iterator[Component]:
    if reward is not None:
        yield Component(name="exact_match", raw=float(reward == 1.0), weighted=reward)


if __name__ == "__main__":
    import sys

    print(make_run(Path(sys.argv[1]), int(sys.argv[2])))
