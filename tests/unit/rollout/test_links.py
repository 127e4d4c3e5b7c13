"""Frames between agents and engines: what is sent arrives, and nothing else is read."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_rollout.links.frames import (
    HEADER,
    FrameError,
    FrameReader,
    Kind,
    pack_frame,
    pack_generation,
    pack_request,
    unpack_generation,
    unpack_request,
)
from forage_rollout.loop.generation import Generation, GenerationRequest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
COUNTS = st.integers(0, 2**32 - 1)
REQUESTS = st.builds(
    GenerationRequest,
    token_ids=TOKENS,
    max_tokens=COUNTS,
    temperature=st.floats(allow_nan=False),
    top_p=st.floats(allow_nan=False),
    top_k=st.integers(-(2**31), 2**31 - 1),
    seed=st.none() | st.integers(0, 2**62),
    stop=st.lists(st.text(), max_size=4).map(tuple),
    min_tokens=COUNTS,
    affinity=st.text(st.characters(exclude_categories=["Cs"])),
    priority=st.integers(-(2**63), 2**63 - 1),
)
GENERATIONS = st.builds(
    lambda tokens, versions, hit: Generation([t for t, _ in tokens], [p for _, p in tokens], hit, versions),
    st.lists(st.tuples(COUNTS, st.floats(width=32, allow_nan=False)), max_size=40),
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62), COUNTS, COUNTS), max_size=4),
    st.booleans(),
)
ASKED = GenerationRequest([1, 2, 3], 4, 0.5, 0.9, 7, 11, ("</x>",), 2, "group", 5)


@settings(max_examples=40)
@given(REQUESTS)
def test_a_request_arrives_as_it_was_sent(request: GenerationRequest) -> None:
    assert unpack_request(pack_request(request)) == request


@settings(max_examples=40)
@given(GENERATIONS)
def test_a_generation_arrives_as_it_was_sent(generation: Generation) -> None:
    assert unpack_generation(pack_generation(generation)) == generation


@settings(max_examples=40)
@given(
    st.sampled_from([pack_request(ASKED), pack_generation(Generation([5], [-0.5], True, [(1, 2, 0, 1)]))]), st.data()
)
def test_damaged_bytes_are_refused_or_read_and_nothing_else(body: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(body) - 1))
    damaged = data.draw(st.sampled_from([body[:at], body[:at] + b"\xff" + body[at + 1 :], body + b"x"]))
    for unpack in (unpack_request, unpack_generation):
        try:
            unpack(damaged)
        except FrameError:
            continue


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(Kind), COUNTS, st.binary(max_size=50)), max_size=8), st.data())
def test_frames_are_cut_wherever_the_network_cuts_them(
    frames: list[tuple[Kind, int, bytes]], data: st.DataObject
) -> None:
    reader, stream = FrameReader(50), b"".join(itertools.starmap(pack_frame, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


def test_a_frame_that_is_too_long_is_refused_before_it_is_here() -> None:
    with pytest.raises(FrameError, match="at most 50"):
        list(FrameReader(50).feed(HEADER.pack(51, Kind.PROOF, 0)))
