"""Bytes of a trajectory on the stream, as a plain message and packed, and the CPU time that packing takes.

    .venvs/trainer/bin/python lab/benchmarks/scale/bytes.py [--samples 16] [--step-files STEP.parquet …]

The last line is JSON. Demo trajectories are recorded ones, of steps 10 and 20 of a `forage demo` (2026-11-23); those of
any other run are measured with `--step-files`. Those of 32k tokens are made, with these assumptions:

- 16 samples share a prompt of 512 tokens and nothing else. Token ids are drawn by Zipf's law from 151,643 (10.4 bits a
  token, about what single tokens of English text have), so nothing repeats but single tokens.
- A share of the response is sampled, in turns; the rest is observations, of three documents each.
- Log-probabilities are float32 with a full mantissa: half of the tokens are nearly certain (log-normal, median -0.05).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from google.protobuf.proto import parse_length_prefixed
from tokenizers import Tokenizer

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    Document,
    PolicySegment,
    Role,
    Score,
    Span,
    Status,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from forage_records.step_file import read_step
from forage_trajectory.codec import Decode, decode_group, leave_out_texts, pack_group, restore_texts, unpack_group

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = Path(__file__).with_name("demo_groups.bin")
TOKENS, PROMPT, TURNS, DOCUMENTS = 32_768, 512, 8, 3
VOCABULARY, ZIPF = 151_643, 1.08
SHARES = (0.25, 0.5, 1.0)
"""Of the response, sampled; the middle one is the figure."""


class Measured:
    """Totals over groups."""

    def __init__(self) -> None:
        self.trajectories = self.before = self.after = 0
        self.parts: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def add(self, group: TrajectoryGroup, decode: Decode) -> None:
        """Pack a group as the agent does, and unpack it as the trainer and a reader do."""
        self.trajectories += len(group.trajectories)
        self.before += group.ByteSize()
        slim = TrajectoryGroup()
        slim.CopyFrom(group)
        began = time.process_time()
        for trajectory in slim.trajectories:
            leave_out_texts(trajectory, decode)
        began = self._note("leave out texts", began)
        packed = pack_group(slim)
        began = self._note("pack", began)
        decode_group(packed)
        began = self._note("decode", began)
        whole = unpack_group(packed)
        self._note("unpack whole", began)
        for trajectory in whole.trajectories:
            restore_texts(trajectory, decode)
        assert whole == group, "what is read is not what was written"
        self.after += packed.ByteSize()
        for field in ("head", "facts", "columns", "texts"):
            part = getattr(packed, field)
            self.parts[field] = self.parts.get(field, 0) + (part.ByteSize() if field == "head" else len(part))

    def _note(self, what: str, began: float) -> float:
        now = time.process_time()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - began
        return now

    def describe(self, name: str) -> str:
        count = self.trajectories
        parts = ", ".join(f"{part} {size / count:.0f}" for part, size in self.parts.items())
        times = ", ".join(f"{what} {1000 * seconds / count:.2f}" for what, seconds in self.seconds.items())
        return (
            f"{name:34} {self.before / count:>9,.0f} → {self.after / count:>8,.0f} bytes a trajectory"
            f" ({self.after / self.before:.0%}): {parts}\n{'':34} CPU-ms a trajectory: {times}"
        )


def read_demo() -> Iterator[TrajectoryGroup]:
    """Read the recorded groups of the demo."""
    with DEMO.open("rb") as file:
        while (packed := parse_length_prefixed(PackedGroup, file)) is not None:
            yield unpack_group(packed)


def read_run(files: Sequence[Path]) -> Iterator[TrajectoryGroup]:
    """Read the groups of a run's trajectory files."""
    for file in files:
        groups: dict[str, TrajectoryGroup] = {}
        for row in read_step(file):
            own = row.trajectory
            group = groups.setdefault(own.group_uid, TrajectoryGroup(run_id=own.run_id, group_uid=own.group_uid))
            group.trajectories.append(own)
        yield from groups.values()


def load_decoder(folder: Path) -> Decode:
    """The decoder of a model folder, as the agent has it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


class Maker:
    """Makes groups of long trajectories, and their tokenizer: a word of 1 to 7 letters for each token."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        letters = "etaoinshrdlucmfwypvbgk"
        self._words = [
            " " + "".join(self._chance.choices(letters, k=self._chance.randint(1, 7))) for _ in range(VOCABULARY)
        ]
        weights = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -ZIPF
        self._shares = weights / weights.sum()
        self.bits = float(-(self._shares * np.log2(self._shares)).sum())
        self._ids = self._numbers.permutation(VOCABULARY)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([self._words[id] for id in ids])

    def make_group(self, samples: int, share: float) -> TrajectoryGroup:
        """
        Args:
            share: of the response's tokens, sampled by the policy.
        """
        prompt = self._draw(PROMPT)
        trajectories = [self._make(number, prompt, share) for number in range(samples)]
        return TrajectoryGroup(run_id="run", group_uid="nq/train/12345/0", batch=7, trajectories=trajectories)

    def _make(self, number: int, prompt: list[int], share: float) -> Trajectory:
        made = Trajectory(
            id=f"run/nq/train/12345/0/{number}",
            run_id="run",
            group_uid="nq/train/12345/0",
            sample=number,
            data_source="nq",
            token_ids=prompt,
            prompt_length=PROMPT,
            spans=[Span(role=Role.ROLE_PROMPT, end=PROMPT, text=self.decode(prompt))],
            score=Score(status=Status.STATUS_OK, total=self._chance.random(), reward="em_format"),
            status=Status.STATUS_OK,
            trace_id=f"{self._chance.getrandbits(128):032x}",
            replica="agent-1",
        )
        response = TOKENS - PROMPT
        turns = TURNS if share < 1 else 1
        generated = int(response * share) // turns
        observed = (response - generated * turns) // max(1, turns - 1) if share < 1 else 0
        for turn in range(1, turns + 1):
            self._add(made, Role.ROLE_MODEL, generated, turn)
            made.turns.add(index=turn, action=ActionKind.ACTION_KIND_SEARCH, content=self.decode(self._draw(8)))
            if turn < turns:
                self._add(made, Role.ROLE_ENV, observed, -1)
                self._add_documents(made.turns[-1], made.spans[-1].text)
        made.segments.append(PolicySegment(version=6, epoch=1, end=len(made.loss_mask)))
        return made

    def _add(self, made: Trajectory, role: Role.ValueType, count: int, turn: int) -> None:
        ids, begin = self._draw(count), len(made.token_ids)
        is_sampled = role == Role.ROLE_MODEL
        made.token_ids.extend(ids)
        made.spans.add(role=role, begin=begin, end=begin + count, text=self.decode(ids))
        made.loss_mask.extend([int(is_sampled)] * count)
        made.turn_ids.extend([turn] * count)
        values = -np.exp(self._numbers.normal(-3.0, 3.0, count)) if is_sampled else np.zeros(count)
        made.logprobs.extend(values.astype(np.float32).tolist())

    def _add_documents(self, turn: Turn, observation: str) -> None:
        size = len(observation) // DOCUMENTS
        for number in range(DOCUMENTS):
            text = observation[number * size + 20 : (number + 1) * size]
            title = self.decode(self._draw(3)).strip()
            document = Document(id=str(self._chance.randrange(10**7)), contents=f'"{title}"\n{text}', score=0.5)
            turn.documents.append(document)
        turn.provenance.index_digest = turn.provenance.corpus_digest = "a" * 64

    def _draw(self, count: int) -> list[int]:
        return list(map(int, self._ids[self._numbers.choice(VOCABULARY, count, p=self._shares)]))


def main(samples: int, step_files: Sequence[Path]) -> None:
    decode = load_decoder(REPOSITORY / "models/tiny-policy")
    demo = Measured()
    for group in read_run(step_files) if step_files else read_demo():
        demo.add(group, decode)
    print(demo.describe(f"demo, {demo.trajectories} trajectories"))
    maker, long = Maker(), {}
    for share in SHARES:
        long[share] = Measured()
        long[share].add(maker.make_group(samples, share), maker.decode)
        print(long[share].describe(f"32k tokens, {share:.0%} sampled"))
    figures = {
        "bytes_32k": round(long[SHARES[1]].after / samples),
        "bytes_32k_before": round(long[SHARES[1]].before / samples),
        "bytes_32k_all_sampled": round(long[1.0].after / samples),
        "bytes_demo_before": round(demo.before / demo.trajectories),
        "bytes_demo": round(demo.after / demo.trajectories),
        "bits_a_token": round(maker.bits, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=16, help="samples of a group of long trajectories")
    parser.add_argument("--step-files", type=Path, nargs="*", default=[], help="trajectories/step-*.parquet of a run")
    given = parser.parse_args()
    main(given.samples, given.step_files)
