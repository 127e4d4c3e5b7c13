"""Packed groups: nothing is lost, damage is noticed, and a small entry cannot ask for much memory."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from fuzz.messages import hostile
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forage_proto.v1.packed_pb2 import PackedFacts, PackedGroup, PackedTexts, Runs
from forage_proto.v1.trajectory_pb2 import Document, Role, Span, Status, Trajectory, TrajectoryGroup, Turn
from forage_trajectory.codec import compress, decode_group, decompress, pack_group, unpack_facts, unpack_group


def make_trajectory(
    sample: int = 0, parts: tuple[int, ...] = (3, 20, 30, 10), chance: random.Random | None = None
) -> Trajectory:
    """A prompt, then generations and observations in turn, of these lengths."""
    chance = chance or random.Random(sample)
    made = Trajectory(id=f"run/g/{sample}", sample=sample, prompt_length=parts[0], status=Status.STATUS_OK)
    ends = [0]
    for place, length in enumerate(parts):
        ends.append(ends[-1] + length)
        role = Role.ROLE_PROMPT if place == 0 else Role.ROLE_MODEL if place % 2 else Role.ROLE_ENV
        made.token_ids.extend(chance.randrange(152_000) for _ in range(length))
        made.spans.add(role=role, begin=ends[-2], end=ends[-1], text=f"text {place} of {sample}")
        if place == 0:
            continue
        is_sampled = role == Role.ROLE_MODEL
        if is_sampled:
            made.turns.append(
                Turn(index=place // 2 + 1, documents=[Document(id="1", contents="title\ntext", score=0.5)])
            )
        made.loss_mask.extend([int(is_sampled)] * length)
        made.turn_ids.extend([place // 2 + 1 if is_sampled else -1] * length)
        made.logprobs.extend(-chance.random() if is_sampled else 0.0 for _ in range(length))
    return made


def make_group(count: int = 4) -> TrajectoryGroup:
    chance = random.Random(5)
    trajectories = [make_trajectory(sample, chance=chance) for sample in range(count)]
    return TrajectoryGroup(run_id="run", group_uid="g", batch=3, position=1, trajectories=trajectories)


def dump(group: TrajectoryGroup) -> bytes:
    """Equal for equal groups, with values that are not equal to themselves too."""
    return group.SerializeToString(deterministic=True)


def read_facts(packed: PackedGroup) -> PackedFacts:
    return PackedFacts.FromString(decompress(packed.facts, 2**20))


@given(hostile(TrajectoryGroup))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_group_comes_back(group: TrajectoryGroup) -> None:
    packed = PackedGroup.FromString(pack_group(group).SerializeToString())
    assert dump(unpack_group(packed)) == dump(group)


@given(st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=4), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_any_trajectory_of_an_agent_comes_back_and_needs_no_mask(
    shapes: list[list[int]], is_cut: bool, seed: int
) -> None:
    group = TrajectoryGroup(trajectories=[make_trajectory(seed % 7, (5, *shape)) for shape in shapes])
    if is_cut and group.trajectories:  # as where a service failed before anything was sampled
        group.trajectories.append(Trajectory(status=Status.STATUS_INTERNAL, status_detail="none"))
    packed = pack_group(group)
    assert unpack_group(packed) == group
    for item in read_facts(packed).trajectories:
        assert not item.HasField("loss_mask")
        assert not item.HasField("turn_ids")
        assert not item.HasField("logprobs")


def test_log_probabilities_come_back_to_the_bit() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.isnan(values), np.float32(-1.0), values)
    own = make_trajectory(parts=(1, len(values)))
    del own.logprobs[:]
    own.logprobs.extend(values.tolist())
    packed = pack_group(TrajectoryGroup(trajectories=[own]))
    (message,), (trajectory,) = unpack_group(packed).trajectories, decode_group(packed).trajectories
    for again in (np.array(message.logprobs, np.float32), trajectory.columns.load().spread_log_probs()):
        assert again.view(np.uint32).tolist() == values.view(np.uint32).tolist()


def test_columns_are_the_fields_as_arrays() -> None:
    group = make_group()
    for trajectory, own in zip(decode_group(pack_group(group)).trajectories, group.trajectories, strict=True):
        columns, (mask, turns) = trajectory.columns.load(), trajectory.read_mask()
        fields = {"token_ids": columns.token_ids, "loss_mask": mask, "turn_ids": turns}
        for name, values in {**fields, "logprobs": columns.spread_log_probs()}.items():
            assert values.dtype == ("f4" if name == "logprobs" else "int32")
            assert values.tolist() == list(getattr(own, name))


def test_facts_have_what_decides_about_a_group_and_no_values_of_tokens() -> None:
    group = make_group(2)
    facts = unpack_facts(pack_group(group))
    assert (facts.group_uid, facts.batch, len(facts.trajectories)) == ("g", 3, 2)
    for own, whole in zip(facts.trajectories, group.trajectories, strict=True):
        assert (own.id, own.status, own.prompt_length) == (whole.id, whole.status, whole.prompt_length)
        assert not any(len(getattr(own, name)) for name in ("token_ids", "logprobs", "loss_mask", "turn_ids"))
        assert [(span.role, span.end, span.text) for span in own.spans] == [(s.role, s.end, "") for s in whole.spans]
        assert not any(turn.documents for turn in own.turns)


def test_samples_share_what_they_have_in_common() -> None:
    one, sixteen = make_group(1), TrajectoryGroup()
    sixteen.trajectories.extend([one.trajectories[0]] * 16)
    assert len(pack_group(sixteen).SerializeToString()) < 2 * len(pack_group(one).SerializeToString())


@pytest.mark.parametrize("name", ["facts", "columns", "texts"])
def test_any_flipped_bit_of_a_frame_is_noticed(name: str) -> None:
    packed = pack_group(make_group(2))
    frame = getattr(packed, name)
    for place in range(len(frame)):
        damaged = PackedGroup()
        damaged.CopyFrom(packed)
        setattr(damaged, name, frame[:place] + bytes([frame[place] ^ 0x10]) + frame[place + 1 :])
        # What a frame does not use may be flipped: then the group is the same.
        with contextlib.suppress(DecodeError):
            assert unpack_group(damaged) == make_group(2)
    for length in range(len(frame)):
        damaged = PackedGroup()
        damaged.CopyFrom(packed)
        setattr(damaged, name, frame[:length])
        if name == "texts" and not length:
            continue  # a group without texts
        with pytest.raises(DecodeError):
            unpack_group(damaged)


def _too_many(facts: PackedFacts) -> None:
    facts.trajectories[0].loss_mask.CopyFrom(Runs(values=[1], lengths=[2**32 - 1]))


def _many_times(facts: PackedFacts) -> None:
    many = Runs(values=[0], lengths=[2**24])
    for _ in range(5):
        facts.trajectories.add().turn_ids.CopyFrom(many)


def _long_span(facts: PackedFacts) -> None:
    facts.trajectories[0].facts.spans[1].end = 2**32 - 1


def _more_tokens(facts: PackedFacts) -> None:
    facts.trajectories[0].tokens += 1


def _all_tokens(facts: PackedFacts) -> None:
    facts.trajectories[0].tokens = 2**32 - 1


def _more_log_probs(facts: PackedFacts) -> None:
    facts.trajectories[0].logprobs = 2**32 - 1


def _no_planes(facts: PackedFacts) -> None:
    facts.token_bytes = 0


def _five_planes(facts: PackedFacts) -> None:
    facts.token_bytes = 2**31


def _odd_role(facts: PackedFacts) -> None:
    facts.trajectories[0].facts.spans[1].role = Role.ROLE_UNSPECIFIED


def _tokens_in_facts(facts: PackedFacts) -> None:
    facts.trajectories[1].facts.token_ids.append(1)


def _lists_of_other_lengths(facts: PackedFacts) -> None:
    facts.trajectories[0].turn_ids.CopyFrom(Runs(values=[1, 2], lengths=[4]))


@pytest.mark.parametrize(
    "change",
    [
        *(_too_many, _many_times, _long_span, _more_tokens, _all_tokens, _more_log_probs, _no_planes, _five_planes),
        *(_odd_role, _tokens_in_facts, _lists_of_other_lengths),
    ],
)
def test_facts_that_contradict_the_columns_are_no_group_and_take_no_memory(
    change: Callable[[PackedFacts], None],
) -> None:
    packed = pack_group(make_group(2))
    facts = read_facts(packed)
    change(facts)
    packed.facts = compress([facts.SerializeToString()])
    packed.texts = b""
    tracemalloc.start()
    with pytest.raises(DecodeError):
        unpack_group(packed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (2**29 if change is _many_times else 2**22), "checked before anything is allocated"


@pytest.mark.parametrize("name", ["facts", "columns", "texts"])
def test_a_frame_that_would_yield_too_much_is_not_decompressed(name: str) -> None:
    packed = pack_group(make_group(1))
    bomb = compress([bytes(2**22)] * 200)  # a few hundred bytes for each 4 MiB
    assert len(bomb) < 2**18
    setattr(packed, name, bomb)
    tracemalloc.start()
    with pytest.raises(DecodeError, match="frame of 838860800 bytes"):
        unpack_group(packed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_texts_of_another_number_of_trajectories_spans_or_turns_are_refused() -> None:
    packed = pack_group(make_group(2))
    for path in ("trajectories", "spans", "turns"):
        texts = PackedTexts.FromString(decompress(packed.texts, 2**20))
        target = texts if path == "trajectories" else texts.trajectories[0]
        del getattr(target, path)[0]
        damaged = PackedGroup()
        damaged.CopyFrom(packed)
        damaged.texts = compress([texts.SerializeToString()])
        for unpack in (unpack_group, decode_group):
            with pytest.raises(DecodeError, match=path):
                unpack(damaged)


def test_parts_of_a_frame_are_one_content() -> None:
    parts = [b"a" * 1000, b"", bytes(range(256)) * 3]
    assert decompress(compress(parts), 10_000) == b"".join(parts)
    assert decompress(compress([]), 0) == b""
    for first, second in pairwise((b"x", b"", b"yz")):
        assert decompress(compress([first, second]), 10) == first + second


def test_an_old_span_is_as_long_as_it_says() -> None:
    # A span beyond the tokens, as only a rogue client writes it: it costs nothing, and comes back.
    group = TrajectoryGroup(trajectories=[Trajectory(spans=[Span(role=Role.ROLE_MODEL, end=2**32 - 1)])])
    assert unpack_group(pack_group(group)) == group
