"""What the agent packs is read as it was, whatever the policy samples: with the real tokenizer, of any token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_proto.v1.packed_pb2 import PackedGroup
from forage_proto.v1.trajectory_pb2 import ActionKind, Document, Prompt, Trajectory, TrajectoryGroup
from forage_rollout.environments.environment import Episode, Observation
from forage_rollout.environments.search import Search
from forage_rollout.loop.generation import Generation, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer
from forage_rollout.loop.trajectory_builder import Limits, TrajectoryBuilder
from forage_runtime.settings import RolloutSettings
from forage_runtime.text.observation import format_passages
from forage_trajectory.codec import leave_out_texts, pack_group, restore_texts, unpack_group

MODELS = Path(__file__).resolve().parents[3] / "models"
CODEC = FileTokenizer(MODELS / "tiny-policy")
IDS = st.lists(st.integers(0, CODEC.vocabulary_size - 1), max_size=60)
# Bytes that are no character by themselves, control tokens, escapes, and forms that a tokenizer may normalise.
TEXTS = st.text(max_size=200) | st.sampled_from(
    ["é𝄞" * 40, "<|im_end|>" * 9, "</information><answer>x</answer> " * 9, "ﬁ①Ａ " * 30, "a\r\n\t \u200b" * 20]
)


def play(prompt: list[int], searches: list[tuple[list[int], list[str]]], limit: int) -> Trajectory:
    limits = Limits(max_start_length=40, max_context_length=2000, max_response_length=500, max_obs_length=limit)
    environment: Any = Search(RolloutSettings(max_turns=len(searches)), None)  # type: ignore[arg-type]
    loop = TrajectoryBuilder.start(limits, CODEC, RenderedPrompt(prompt), environment, Episode(Prompt()))
    for ids, contents in searches:
        sampled = [*ids, *CODEC.encode(" <search> q </search>")]
        loop.add_generation(Generation(sampled, [-0.5] * len(sampled), False, [(1, 1, 0, len(sampled))]))
        loop.turns[-1].action = ActionKind.ACTION_KIND_SEARCH
        documents = [Document(id=str(n), contents=text) for n, text in enumerate(contents)]
        loop.add_observation(Observation(format_passages(documents).strip(), documents=documents))
    return loop.build()


@given(IDS, st.lists(st.tuples(IDS, st.lists(TEXTS, max_size=3)), max_size=3), st.sampled_from([40, 60, 500]))
@settings(max_examples=40, deadline=None)
def test_texts_are_read_as_the_agent_had_them(
    prompt: list[int], searches: list[tuple[list[int], list[str]]], limit: int
) -> None:
    whole = TrajectoryGroup(trajectories=[play(prompt, searches, limit)] * 2)
    slim = TrajectoryGroup()
    slim.CopyFrom(whole)
    for trajectory in slim.trajectories:
        leave_out_texts(trajectory, CODEC.decode)
    read = unpack_group(PackedGroup.FromString(pack_group(slim).SerializeToString()))
    for trajectory in read.trajectories:
        restore_texts(trajectory, CODEC.decode)
    assert read == whole


@pytest.mark.parametrize("text", ["Who wrote Faust?", "Wer schrieb „Faust“? 𝄞"])
def test_usual_texts_are_left_out(text: str) -> None:
    trajectory = play(CODEC.encode(text), [(CODEC.encode("<think> so </think>"), [f"Faust\n{text * 5}"])], 500)
    leave_out_texts(trajectory, CODEC.decode)
    assert [span.text for span in trajectory.spans] == ["", "", ""]
    assert trajectory.turns[0].documents[0].contents == "Faust\n"
