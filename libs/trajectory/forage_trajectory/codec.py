"""The codec of trajectory groups: packed for a stream, a third of the bytes or less, and nothing is lost.

The rollout service packs messages once (`pack_group`); the trainer decodes what arrives once (`decode_group`).

- What has a value per token is in columns: token ids, and log-probabilities of sampled tokens alone, as float32 to the
  bit. Loss mask and turn ids follow from the spans; where they do not, they are run lengths. A column is cut into
  planes, each the bytes of one weight of many numbers: those of the high bytes take few values and code well; between
  those of the low bytes zstd would find them less often.
- The rest of each trajectory is its facts: what decides about a group, without a value per token and without texts.
- Texts of spans and contents of documents are apart. The agent leaves out those that the tokens imply
  (`leave_out_texts`), and who shows them decodes the tokens again (`restore_texts`). A checksum shows a reader whose
  tokenizer is another one.

Each of the three is a zstd frame over the whole group, so what its samples share is there once.
"""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard
from google.protobuf.message import DecodeError

from forage_proto.v1.packed_pb2 import PackedFacts, PackedGroup, PackedTexts, PackedTrajectory, Runs, TrajectoryTexts
from forage_proto.v1.trajectory_pb2 import Document, Role, Span, TrajectoryGroup, Turn
from forage_proto.v1.trajectory_pb2 import Trajectory as TrajectoryMessage
from forage_runtime.errors import DataError
from forage_trajectory.trajectory import (
    AnyColumns,
    ColumnFolder,
    Columns,
    Group,
    ReadPacked,
    TokenCounts,
    Trajectory,
    find_runs,
)

_PerToken = Literal["token_ids", "loss_mask", "turn_ids", "logprobs"]
_PER_TOKEN: tuple[_PerToken, ...] = ("token_ids", "loss_mask", "turn_ids", "logprobs")
_FLOAT_BYTES = 4
_MOST_FACTS, _MOST_TEXTS = 2**28, 2**29
"""Bytes that a frame may have when it is decompressed."""
_NONE = Columns(np.empty(0, np.int32), np.empty((0, 3), np.int32), np.empty(0, np.float32))
Decode = Callable[[Sequence[int]], str]
"""The text of token ids, control tokens included."""
_SHORTEST_QUOTE = 24
_LEVEL = 3
_MOST_VALUES = 2**26
_PROMPT, _MODEL, _ENV = Role.ROLE_PROMPT, Role.ROLE_MODEL, Role.ROLE_ENV  # looking them up costs as much as their use
Ints: TypeAlias = npt.NDArray[np.int32]
Words: TypeAlias = npt.NDArray[np.uint32]


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


def unpack_group(packed: PackedGroup) -> TrajectoryGroup:
    """Unpack a whole group. Texts that were left out before it was packed still are, see `texts.restore_texts`."""
    facts = _read_facts(packed)
    texts = _read_texts(packed, facts)
    group = _copy_head(packed.head)
    for item, values, own in zip(facts.trajectories, _read_values(packed, facts), texts, strict=True):
        trajectory = group.trajectories.add()
        trajectory.CopyFrom(item.facts)
        trajectory.token_ids.extend(values.token_ids.view(np.uint32).tolist())
        trajectory.loss_mask.extend(values.loss_mask.view(np.uint32).tolist())
        trajectory.turn_ids.extend(values.turn_ids.tolist())
        trajectory.logprobs.extend(values.logprobs.tolist())
        _add_texts(trajectory, own)
    return group


def decode_group(packed: PackedGroup, folder: ColumnFolder | None = None) -> Group:
    """Decode a group of a stream. Texts are checked, and not kept: later would be too late to find them damaged.

    Args:
        folder: puts the columns, and the group as it was on the stream, into a file there.

    Raises:
        DecodeError: it is damaged.
        DiskFullError: there is no room for the file.
    """
    facts = _read_facts(packed)
    _read_texts(packed, facts)
    counts, columns = [], []
    for item, values in zip(facts.trajectories, _read_values(packed, facts), strict=True):
        counts.append(_count(item.facts.prompt_length, values))
        columns.append(_compact(values) if counts[-1].whole else _NONE)
    kept: Sequence[AnyColumns] = columns
    read_packed: ReadPacked = partial(_give, packed)
    if folder is not None:
        kept, rest = folder.write(columns, packed.SerializeToString())
        read_packed = partial(_read_packed, rest)
    head = packed.head
    trajectories = []
    for number, (count, own, stored) in enumerate(zip(counts, columns, kept, strict=True)):
        one = facts.trajectories[number].facts
        trajectories.append(
            Trajectory(
                id=one.id,
                group_uid=one.group_uid,
                sample=one.sample,
                data_source=one.data_source,
                prompt_length=one.prompt_length,
                segments=one.segments,
                turns=one.turns,
                score=one.score,
                validation_score=one.validation_score,
                finished=one.finished,
                truncated=one.truncated,
                valid_searches=one.valid_searches,
                status=one.status,
                status_detail=one.status_detail,
                timings=one.timings,
                sampling=one.sampling,
                counts=count,
                runs=own.runs,
                digest=_digest(f"{head.position}/{one.data_source}/{one.sample}", own, one.score.total),
                stored=stored if count.whole else None,
                source=(read_packed, number),
            )
        )
    return Group(
        run_id=head.run_id,
        group_uid=head.group_uid,
        purpose=head.purpose,
        batch=head.batch,
        position=head.position,
        attempt=head.attempt,
        traceparent=head.traceparent,
        trajectories=tuple(trajectories),
        read_packed=read_packed,
    )


def restore_group(group: Group) -> list[TrajectoryMessage]:
    """The trajectories of a group as whole messages, with the status that they have now; slow."""
    whole = unpack_group(group.read_packed())
    for message, trajectory in zip(whole.trajectories, group.trajectories, strict=True):
        message.status, message.status_detail = trajectory.status, trajectory.status_detail
    return list(whole.trajectories)


def restore_trajectory(trajectory: Trajectory) -> TrajectoryMessage:
    """A trajectory as a whole message, as it was on the stream; slow."""
    read_packed, number = trajectory.source
    return unpack_group(read_packed()).trajectories[number]


def _copy_head(group: TrajectoryGroup) -> TrajectoryGroup:
    return TrajectoryGroup(**{field.name: value for field, value in group.ListFields() if field.name != "trajectories"})


def _pack_columns(trajectory: TrajectoryMessage, item: PackedTrajectory) -> tuple[Words, Words]:
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
    return len(values) == sum(runs.lengths) and np.array_equal(values, decode_runs(runs, DecodeBudget()))


def _pack_texts(trajectory: TrajectoryMessage, own: TrajectoryTexts) -> None:
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


def _read_values(packed: PackedGroup, facts: PackedFacts) -> list[TokenValues]:
    if not 1 <= facts.token_bytes <= _FLOAT_BYTES:
        raise DecodeError(f"token ids of a packed group have {facts.token_bytes} bytes")
    budgets = {
        "token_ids": DecodeBudget(),
        "loss_mask": DecodeBudget(),
        "turn_ids": DecodeBudget(),
        "logprobs": DecodeBudget(),
    }
    masks, turns, stored = [], [], []
    for item in facts.trajectories:
        mask_runs, turn_runs = derive_marks(item.facts.spans) or (None, None)
        mask = _read_runs(item.loss_mask if item.HasField("loss_mask") else mask_runs, budgets["loss_mask"])
        turn = _read_runs(item.turn_ids if item.HasField("turn_ids") else turn_runs, budgets["turn_ids"])
        stored.append(item.logprobs if item.HasField("logprobs") else int(np.count_nonzero(mask == 1)))
        budgets["token_ids"].take(item.tokens)
        budgets["logprobs"].take(stored[-1])
        masks.append(mask)
        turns.append(turn)
    tokens, values = sum(item.tokens for item in facts.trajectories), sum(stored)
    ids_size, size = facts.token_bytes * tokens, facts.token_bytes * tokens + _FLOAT_BYTES * values
    data = memoryview(decompress(packed.columns, size))
    if len(data) != size:
        raise DecodeError(f"columns of a packed group have {len(data)} bytes, {size} are expected")
    ids = join_planes(data[:ids_size], tokens, facts.token_bytes).view(np.int32)
    log_probs = join_planes(data[ids_size:], values, _FLOAT_BYTES).view(np.float32)
    values_of = []
    ends = zip(_bounds([item.tokens for item in facts.trajectories]), _bounds(stored), strict=True)
    for item, mask, turn, (own_ids, own_values) in zip(facts.trajectories, masks, turns, ends, strict=True):
        own = log_probs[slice(*own_values)]
        if not item.HasField("logprobs"):
            sampled, own = own, np.zeros(len(mask), np.float32)
            own[mask == 1] = sampled
        values_of.append(TokenValues(ids[slice(*own_ids)], mask, turn, own))
    return values_of


def _read_runs(runs: Runs | None, budget: DecodeBudget) -> Ints:
    if runs is None:
        raise DecodeError("a packed trajectory has neither a loss mask nor spans from which it follows")
    return decode_runs(runs, budget)


def _bounds(lengths: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(lengths, initial=0)))


def _read_texts(packed: PackedGroup, facts: PackedFacts) -> list[TrajectoryTexts]:
    count = len(facts.trajectories)
    if not packed.texts:
        return [TrajectoryTexts()] * count
    texts = PackedTexts.FromString(decompress(packed.texts, _MOST_TEXTS))
    if len(texts.trajectories) != count:
        raise DecodeError(f"a packed group has texts of {len(texts.trajectories)} trajectories, and {count} of them")
    for item, own in zip(facts.trajectories, texts.trajectories, strict=True):
        _check_texts(item.facts, own)
    return list(texts.trajectories)


def _check_texts(trajectory: TrajectoryMessage, own: TrajectoryTexts) -> None:
    for name, has, found in (("spans", trajectory.spans, own.spans), ("turns", trajectory.turns, own.turns)):
        if found and len(found) != len(has):
            raise DecodeError(f"a packed trajectory has texts of {len(found)} {name}, and {len(has)} of them")


def _add_texts(trajectory: TrajectoryMessage, own: TrajectoryTexts) -> None:
    for span, text in zip(trajectory.spans, own.spans, strict=False):
        span.text = text
    for turn, documents in zip(trajectory.turns, own.turns, strict=False):
        turn.documents.extend(documents.documents)


def _count(prompt_length: int, values: TokenValues) -> TokenCounts:
    tokens, response, mask = len(values.token_ids), len(values.loss_mask), values.loss_mask
    same = tokens - prompt_length == response == len(values.turn_ids) == len(values.logprobs)
    return TokenCounts(tokens, response, int(mask.sum(dtype=np.int64)), same and not (mask > 1).any())


def _compact(values: TokenValues) -> Columns:
    # A copy: a view would keep the whole group in memory.
    mask = values.loss_mask
    return Columns(values.token_ids.copy(), find_runs(mask, values.turn_ids), values.logprobs[mask > 0])


def _digest(place: str, columns: Columns, reward: float) -> bytes:
    digest = hashlib.sha256(f"{place}\n".encode())
    parts: tuple[tuple[npt.NDArray[Any], Any], ...] = (
        (np.array([len(columns.token_ids), len(columns.sampled)]), np.uint64),
        (columns.token_ids, np.int32),
        (columns.sampled, np.uint8),
        (columns.log_probs, np.float32),
        (np.array([reward]), np.float64),
    )
    for values, kind in parts:
        digest.update(np.ascontiguousarray(values, dtype=kind))
    return digest.digest()


def _give(packed: PackedGroup) -> PackedGroup:
    return packed


def _read_packed(read: Callable[[], bytes]) -> PackedGroup:
    return PackedGroup.FromString(read())


def leave_out_texts(trajectory: TrajectoryMessage, decode: Decode) -> None:
    """Leave out the texts of spans that their tokens decode to, and what documents and observations both have."""
    for turn, observation in _pair(trajectory):
        _quote_documents(turn, observation.text)
    ids = list(trajectory.token_ids)
    left_out = []
    for span in trajectory.spans:
        if span.text and span.text == decode(ids[span.begin : span.end]):
            left_out.append(span.text)
            span.implied, span.text = True, ""
    if left_out:
        trajectory.implied_crc32 = zlib.crc32("".join(left_out).encode())


def restore_texts(trajectory: TrajectoryMessage, decode: Decode) -> None:
    """Put back what `leave_out_texts` left out; a trajectory that has all of its texts stays as it is.

    Raises:
        DataError: the tokenizer decodes another text than the agent's, or a document names what is not there. The
            trajectory is as before.
    """
    if not lacks_texts(trajectory):
        return
    implied = [span for span in trajectory.spans if span.implied]
    ids = list(trajectory.token_ids) if implied else []
    texts = [decode(ids[span.begin : span.end]) for span in implied]
    if zlib.crc32("".join(texts).encode()) != trajectory.implied_crc32:
        raise DataError(
            f"the tokens of trajectory {trajectory.id} decode to another text than in the rollout service: "
            "give trainer and rollout service the same model.path"
        )
    whole = TrajectoryMessage()
    whole.CopyFrom(trajectory)
    whole.ClearField("implied_crc32")
    for span, text in zip((span for span in whole.spans if span.implied), texts, strict=True):
        span.text, span.implied = text, False
    for turn, observation in _pair(whole):
        for document in turn.documents:
            if document.HasField("quote"):
                _restore_document(document, observation.text, trajectory.id)
    trajectory.CopyFrom(whole)


def lacks_texts(trajectory: TrajectoryMessage) -> bool:
    """Whether `restore_texts` has anything to put back."""
    return trajectory.HasField("implied_crc32") or any(
        document.HasField("quote") for turn in trajectory.turns for document in turn.documents
    )


def _pair(trajectory: TrajectoryMessage) -> Iterator[tuple[Turn, Span]]:
    """The turns with documents, each with the observation that answers it."""
    sampled = [place for place, span in enumerate(trajectory.spans) if span.role == Role.ROLE_MODEL]
    for turn, place in zip(trajectory.turns, sampled, strict=False):
        if turn.documents and place + 1 < len(trajectory.spans):
            yield turn, trajectory.spans[place + 1]


def _quote_documents(turn: Turn, observation: str) -> None:
    """Leave out of each document's contents what the observation has of its text, from the beginning."""
    cursor = 0
    for document in turn.documents:
        title, newline, text = document.contents.partition("\n")
        begin = observation.find(text[:_SHORTEST_QUOTE], cursor)
        if len(text) < _SHORTEST_QUOTE or begin < 0:
            continue
        # The end of an observation may be cut off, and tags in it are escaped.
        length = bisect_left(
            range(1, len(text) + 1), True, key=lambda size: not observation.startswith(text[:size], begin)
        )
        cursor = begin + length
        at = len(title) + len(newline)
        document.quote.at, document.quote.begin, document.quote.length = at, begin, length
        document.contents = document.contents[:at] + document.contents[at + length :]


def _restore_document(document: Document, observation: str, id: str) -> None:
    quote, rest = document.quote, document.contents
    quoted = observation[quote.begin : quote.begin + quote.length]
    if quote.at > len(rest) or len(quoted) != quote.length:
        raise DataError(f"a document of trajectory {id} quotes what its observation does not have: it is damaged")
    document.contents = rest[: quote.at] + quoted + rest[quote.at :]
    document.ClearField("quote")


@dataclass(frozen=True)
class TokenValues:
    """What a trajectory has a value per token of, as the fields of its message.

    token_ids: (tokens,) int32, prompt and response.
    loss_mask, turn_ids: (response,) int32; logprobs: (response,) float32.
    """

    token_ids: Ints
    loss_mask: Ints
    turn_ids: Ints
    logprobs: npt.NDArray[np.float32]


class DecodeBudget:
    """How many values of a column the trajectories of one group may still have, whatever a damaged entry says."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def take(self, count: int) -> None:
        """
        Raises:
            DecodeError: there is no room for so many values.
        """
        self._left -= count
        if count < 0 or self._left < 0:
            raise DecodeError(f"a packed group names more than {_MOST_VALUES} values of a column")


def derive_marks(spans: Sequence[Span]) -> tuple[Runs, Runs] | None:
    """Derive loss mask and turn ids of a response from who wrote each of its spans; None where they do not say."""
    mask, turn_ids = Runs(), Runs()
    turn = 0
    for span in spans:
        if span.role == _PROMPT and not mask.lengths:
            continue
        if span.role not in (_MODEL, _ENV) or span.end < span.begin:
            return None
        is_sampled = span.role == _MODEL
        turn += is_sampled
        for runs, value in ((mask, int(is_sampled)), (turn_ids, turn if is_sampled else -1)):
            runs.values.append(value)
            runs.lengths.append(span.end - span.begin)
    return mask, turn_ids


def encode_runs(values: npt.NDArray[Any]) -> Runs:
    """Encode a list of numbers as runs of equal ones."""
    if not len(values):
        return Runs()
    begins = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
    lengths = np.diff(np.concatenate([begins, [len(values)]]))
    return Runs(values=values[begins].tolist(), lengths=lengths.tolist())


def decode_runs(runs: Runs, budget: DecodeBudget) -> Ints:
    """
    Raises:
        DecodeError: lists of different lengths, or too many values.
    """
    if len(runs.values) != len(runs.lengths):
        raise DecodeError(f"{len(runs.values)} runs have {len(runs.lengths)} lengths")
    budget.take(sum(runs.lengths))
    values: Ints = np.repeat(np.array(runs.values, dtype=np.int64).astype(np.int32), runs.lengths)
    return values


def split_planes(values: Words, count: int) -> list[bytes]:
    """The `count` lowest bytes of each value, as planes."""
    columns = values.astype("<u4").view(np.uint8).reshape(-1, 4)
    return [columns[:, place].tobytes() for place in range(count)]


def join_planes(data: memoryview, length: int, count: int) -> Words:
    """The inverse of `split_planes`."""
    columns: npt.NDArray[np.uint8] = np.zeros((length, 4), dtype=np.uint8)
    for place in range(count):
        columns[:, place] = np.frombuffer(data, np.uint8, length, offset=place * length)
    values: Words = columns.reshape(-1).view("<u4").astype(np.uint32, copy=False)
    return values


def compress(parts: Iterable[bytes]) -> bytes:
    """Compress into one frame, in which each part has statistics of its own; its end is a checksum."""
    parts = list(parts)
    # A compressor is not for several threads at a time.
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj(size=sum(map(len, parts)))
    pieces = []
    for part in parts:
        pieces += [compressor.compress(part), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*pieces, compressor.flush()])


def decompress(frame: bytes, most: int) -> bytes:
    """Decompress a frame, which says how long its content is.

    Raises:
        DecodeError: it is damaged, or longer than `most` bytes: nothing is allocated then.
    """
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            raise DecodeError(f"a packed group has a frame of {size} bytes, at most {most} are expected")
        return bytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False))
    except (ValueError, zstandard.ZstdError) as error:
        raise DecodeError(f"a packed group has a damaged frame ({error})") from None
