"""Trajectory groups as they are on a stream: a third of the bytes or less, and nothing is lost.

- What has a value per token is in columns (`columns`): token ids, and log-probabilities of sampled tokens alone, as
  float32 to the bit. Loss mask and turn ids follow from the spans; where they do not, they are run lengths.
- The rest of each trajectory is its facts: what decides about a group, without a value per token and without texts.
- Texts of spans and contents of documents are apart. `texts` leaves out those that the tokens imply.

Each of the three is a zstd frame over the whole group, so what its samples share is there once.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from google.protobuf.message import DecodeError

from forage_proto.v1.packed_pb2 import PackedFacts, PackedGroup, PackedTexts, PackedTrajectory, Runs, TrajectoryTexts
from forage_proto.v1.trajectory_pb2 import Trajectory, TrajectoryGroup
from forage_trajectory.columns import (
    Columns,
    Ints,
    Room,
    Words,
    compress,
    decode_runs,
    decompress,
    derive_marks,
    encode_runs,
    join_planes,
    split_planes,
)

_PerToken = Literal["token_ids", "loss_mask", "turn_ids", "logprobs"]
_PER_TOKEN: tuple[_PerToken, ...] = ("token_ids", "loss_mask", "turn_ids", "logprobs")
_FLOAT_BYTES = 4
_MOST_FACTS, _MOST_TEXTS = 2**28, 2**29
"""Bytes that a frame may have when it is decompressed."""


def pack_group(group: TrajectoryGroup) -> PackedGroup:
    """Pack a group; `unpack_group` gives an equal one."""
    facts, texts = PackedFacts(), PackedTexts()
    token_ids, log_probs = [], []
    for trajectory in group.trajectories:
        own_ids, own_log_probs = _pack_columns(trajectory, facts.trajectories.add())
        token_ids.append(own_ids)
        log_probs.append(own_log_probs)
        _pack_texts(trajectory, texts.trajectories.add())
    ids = np.concatenate(token_ids) if token_ids else np.zeros(0, np.uint32)
    bits = np.concatenate(log_probs) if log_probs else np.zeros(0, np.uint32)
    facts.token_bytes = max(1, (int(ids.max(initial=0)).bit_length() + 7) // 8)
    has_texts = any(own.ByteSize() for own in texts.trajectories)
    return PackedGroup(
        head=_copy_head(group),
        facts=compress([facts.SerializeToString()]),
        columns=compress([*split_planes(ids, facts.token_bytes), *split_planes(bits, _FLOAT_BYTES)]),
        texts=compress([texts.SerializeToString()]) if has_texts else b"",
    )


def unpack_facts(packed: PackedGroup) -> TrajectoryGroup:
    """Unpack a group without what has a value per token, without texts of spans and documents of turns.

    Raises:
        DecodeError: it is damaged; so do the other functions that unpack.
    """
    group = _copy_head(packed.head)
    group.trajectories.extend(item.facts for item in _read_facts(packed).trajectories)
    return group


def unpack_columns(packed: PackedGroup) -> list[Columns]:
    """Unpack what each trajectory of a group has a value per token of. Texts are checked, and not returned.

    Who goes on with columns reads the texts later, where they are shown: too late to find that they are damaged.
    """
    facts = _read_facts(packed)
    for item, own in zip(facts.trajectories, _read_texts(packed, len(facts.trajectories)), strict=True):
        _check_texts(item.facts, own)
    return _read_columns(packed, facts)


def unpack_group(packed: PackedGroup) -> TrajectoryGroup:
    """Unpack a whole group. Texts that were left out before it was packed still are, see `texts.restore_texts`."""
    facts = _read_facts(packed)
    texts = _read_texts(packed, len(facts.trajectories))
    group = _copy_head(packed.head)
    for item, columns, own in zip(facts.trajectories, _read_columns(packed, facts), texts, strict=True):
        trajectory = group.trajectories.add()
        trajectory.CopyFrom(item.facts)
        trajectory.token_ids.extend(columns.token_ids.view(np.uint32).tolist())
        trajectory.loss_mask.extend(columns.loss_mask.view(np.uint32).tolist())
        trajectory.turn_ids.extend(columns.turn_ids.tolist())
        trajectory.logprobs.extend(columns.logprobs.tolist())
        _add_texts(trajectory, own)
    return group


def _copy_head(group: TrajectoryGroup) -> TrajectoryGroup:
    return TrajectoryGroup(**{field.name: value for field, value in group.ListFields() if field.name != "trajectories"})


def _pack_columns(trajectory: Trajectory, item: PackedTrajectory) -> tuple[Words, Words]:
    """Fill `item` and return, as uint32, the token ids and the bits of the log-probabilities that are stored."""
    item.facts.CopyFrom(trajectory)
    for name in _PER_TOKEN:
        item.facts.ClearField(name)
    for span in item.facts.spans:
        span.ClearField("text")
    for turn in item.facts.turns:
        turn.ClearField("documents")
    mask = np.asarray(trajectory.loss_mask, dtype=np.uint32).view(np.int32)
    turns = np.asarray(trajectory.turn_ids, dtype=np.int32)
    derived = derive_marks(trajectory.spans)
    for values, target, place in ((mask, item.loss_mask, 0), (turns, item.turn_ids, 1)):
        if derived is None or not _equals(values, derived[place]):
            target.CopyFrom(encode_runs(values))
            target.SetInParent()  # of no values, too
    ids = np.asarray(trajectory.token_ids, dtype=np.uint32)
    bits = np.asarray(trajectory.logprobs, dtype=np.float32).view(np.uint32)
    item.tokens = len(ids)
    if len(bits) == len(mask) and not bits[mask != 1].any():
        return ids, bits[mask == 1]
    item.logprobs = len(bits)
    return ids, bits


def _equals(values: Ints, runs: Runs) -> bool:
    return len(values) == sum(runs.lengths) and np.array_equal(values, decode_runs(runs, Room()))


def _pack_texts(trajectory: Trajectory, own: TrajectoryTexts) -> None:
    if any(span.text for span in trajectory.spans):
        own.spans.extend(span.text for span in trajectory.spans)
    if any(turn.documents for turn in trajectory.turns):
        for turn in trajectory.turns:
            own.turns.add().documents.extend(turn.documents)


def _read_facts(packed: PackedGroup) -> PackedFacts:
    facts = PackedFacts.FromString(decompress(packed.facts, _MOST_FACTS))
    for item in facts.trajectories:
        if any(len(getattr(item.facts, name)) for name in _PER_TOKEN):
            raise DecodeError("the facts of a packed trajectory have values per token, which belong into its columns")
    return facts


def _read_columns(packed: PackedGroup, facts: PackedFacts) -> list[Columns]:
    if not 1 <= facts.token_bytes <= _FLOAT_BYTES:
        raise DecodeError(f"token ids of a packed group have {facts.token_bytes} bytes")
    rooms = {"token_ids": Room(), "loss_mask": Room(), "turn_ids": Room(), "logprobs": Room()}
    masks, turns, stored = [], [], []
    for item in facts.trajectories:
        mask_runs, turn_runs = derive_marks(item.facts.spans) or (None, None)
        mask = _read_runs(item.loss_mask if item.HasField("loss_mask") else mask_runs, rooms["loss_mask"])
        turn = _read_runs(item.turn_ids if item.HasField("turn_ids") else turn_runs, rooms["turn_ids"])
        stored.append(item.logprobs if item.HasField("logprobs") else int(np.count_nonzero(mask == 1)))
        rooms["token_ids"].take(item.tokens)
        rooms["logprobs"].take(stored[-1])
        masks.append(mask)
        turns.append(turn)
    tokens, values = sum(item.tokens for item in facts.trajectories), sum(stored)
    ids_size, size = facts.token_bytes * tokens, facts.token_bytes * tokens + _FLOAT_BYTES * values
    data = memoryview(decompress(packed.columns, size))
    if len(data) != size:
        raise DecodeError(f"columns of a packed group have {len(data)} bytes, {size} are expected")
    ids = join_planes(data[:ids_size], tokens, facts.token_bytes).view(np.int32)
    log_probs = join_planes(data[ids_size:], values, _FLOAT_BYTES).view(np.float32)
    columns = []
    ends = zip(_bounds([item.tokens for item in facts.trajectories]), _bounds(stored), strict=True)
    for item, mask, turn, (own_ids, own_values) in zip(facts.trajectories, masks, turns, ends, strict=True):
        own = log_probs[slice(*own_values)]
        if not item.HasField("logprobs"):
            sampled, own = own, np.zeros(len(mask), np.float32)
            own[mask == 1] = sampled
        columns.append(Columns(ids[slice(*own_ids)], mask, turn, own))
    return columns


def _read_runs(runs: Runs | None, room: Room) -> Ints:
    if runs is None:
        raise DecodeError("a packed trajectory has neither a loss mask nor spans from which it follows")
    return decode_runs(runs, room)


def _bounds(lengths: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(lengths, initial=0)))


def _read_texts(packed: PackedGroup, count: int) -> list[TrajectoryTexts]:
    if not packed.texts:
        return [TrajectoryTexts()] * count
    texts = PackedTexts.FromString(decompress(packed.texts, _MOST_TEXTS))
    if len(texts.trajectories) != count:
        raise DecodeError(f"a packed group has texts of {len(texts.trajectories)} trajectories, and {count} of them")
    return list(texts.trajectories)


def _check_texts(trajectory: Trajectory, own: TrajectoryTexts) -> None:
    for name, has, found in (("spans", trajectory.spans, own.spans), ("turns", trajectory.turns, own.turns)):
        if found and len(found) != len(has):
            raise DecodeError(f"a packed trajectory has texts of {len(found)} {name}, and {len(has)} of them")


def _add_texts(trajectory: Trajectory, own: TrajectoryTexts) -> None:
    _check_texts(trajectory, own)
    for span, text in zip(trajectory.spans, own.spans, strict=False):
        span.text = text
    for turn, documents in zip(trajectory.turns, own.turns, strict=False):
        turn.documents.extend(documents.documents)
