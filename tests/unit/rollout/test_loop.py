"""The loop as a state machine: masks, ids, lengths, with scripted generations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forage_proto.v1.trajectory_pb2 import ActionKind, Document, Prompt, Role, Trajectory
from forage_rollout.environments.environment import Action, Episode, Observation
from forage_rollout.environments.search import Search
from forage_rollout.loop.generation import Generation, RenderedPrompt
from forage_rollout.loop.tokens import encode_observation
from forage_rollout.loop.trajectory_builder import Limits, TrajectoryBuilder, split_opening
from forage_runtime.errors import SettingsError
from forage_runtime.settings import EngineSettings, RolloutSettings
from forage_runtime.text.observation import format_passages

WIDE = Limits(max_start_length=100, max_context_length=2000, max_response_length=500, max_obs_length=500)


def build_generation(ids: list[int], split: int | None = None, hit_length: bool = False) -> Generation:
    spans = [(1, 1, 0, len(ids))] if split is None else [(1, 1, 0, split), (2, 1, split, len(ids))]
    return Generation(ids, [-0.5] * len(ids), hit_length, spans)


def begin(codec: Any, limits: Limits, prompt: str, max_turns: int = 2) -> TrajectoryBuilder:
    search = Search(RolloutSettings(max_turns=max_turns), None)  # type: ignore[arg-type] - no test here searches
    return TrajectoryBuilder.start(limits, codec, RenderedPrompt(codec.encode(prompt)), search, Episode(Prompt()))


def build_observation(contents: Sequence[str]) -> Observation:
    documents = [Document(contents=text) for text in contents]
    return Observation(format_passages(documents).strip(), documents=documents)


def add_generation(loop: TrajectoryBuilder, generation: Generation) -> Action:
    """As the agent does."""
    text = loop.add_generation(generation)
    return loop.add_action(loop.environment.parse(text, loop.episode))  # type: ignore[arg-type] - in this process


def play(
    codec: Any,
    max_turns: int,
    limits: Limits,
    prompt: str,
    script: Sequence[str],
    documents: dict[str, list[str]],
    split: int | None = None,
) -> tuple[Trajectory, list[list[int]]]:
    loop = begin(codec, limits, prompt, max_turns)
    contexts = []
    answers = iter(script)
    while (context := loop.next_context()) is not None:
        contexts.append(context)
        action = add_generation(loop, build_generation(codec.encode(next(answers)), split))
        if not loop.may_act or action.kind == ActionKind.ACTION_KIND_ANSWER:
            continue
        if action.kind == ActionKind.ACTION_KIND_SEARCH:
            loop.add_observation(build_observation(documents.get(action.content, [])))
        else:
            loop.add_feedback()
    return loop.build(), contexts


def test_a_scripted_rollout_gives_what_the_table_says(loops_row: dict[str, Any], char_codec: Any) -> None:
    codec = char_codec()
    sizes = loops_row["limits"]
    limits = Limits(
        max_start_length=sizes["max_start_length"],
        max_context_length=sizes["max_prompt_length"],
        max_response_length=sizes["max_response_length"],
        max_obs_length=sizes["max_obs_length"],
    )
    done, contexts = play(
        codec, sizes["max_turns"], limits, loops_row["prompt"], loops_row["generations"], loops_row["documents"]
    )
    response = list(done.token_ids)[done.prompt_length :]
    assert codec.decode(list(done.token_ids)[: done.prompt_length]) == loops_row["kept_prompt"]
    assert codec.decode(response) == loops_row["response"]
    assert list(done.loss_mask) == [value for value, count in loops_row["loss_mask"] for _ in range(count)]
    model = [token for token, state in zip(response, done.loss_mask, strict=True) if state]
    assert codec.decode(model) == loops_row["model_text"]
    assert len(done.turns) == loops_row["turns"]
    assert done.finished == loops_row["finished"]
    assert (done.valid_actions, done.valid_searches) == (loops_row["valid_actions"], loops_row["valid_searches"])
    assert done.truncated == (loops_row["prompt"] != loops_row["kept_prompt"])
    for context in contexts:  # what was sampled under is what is trained on
        assert context == list(done.token_ids)[: len(context)]


def test_a_single_step_gives_what_the_table_says(steps_row: dict[str, Any], char_codec: Any) -> None:
    codec = char_codec()
    text = steps_row["generation"]
    loop = begin(codec, WIDE, "P")
    action = add_generation(loop, build_generation(codec.encode(text)))
    if action.kind == ActionKind.ACTION_KIND_SEARCH:
        loop.add_observation(build_observation(steps_row["documents"][action.content]))
    elif action.kind == ActionKind.ACTION_KIND_INVALID:
        loop.add_feedback()
    done = loop.build()
    assert codec.decode(loop.token_ids[1 + len(text) :]) == steps_row["observation"]
    assert done.finished == steps_row["done"]
    assert done.valid_actions == steps_row["valid"]
    assert done.valid_searches == steps_row["search"]


PIECE = st.sampled_from(
    ["<search>q</search>", "<answer>a</answer>", "nothing", "", "<search>q</search>tail", "x</answer>", "<search>long"]
)


@settings(max_examples=40)
@given(
    script=st.lists(PIECE, min_size=4, max_size=4),
    max_turns=st.integers(0, 3),
    context=st.integers(30, 400),
    observation=st.integers(32, 300),
    split=st.integers(0, 3),
)
def test_per_token_fields_agree(
    script: list[str], max_turns: int, context: int, observation: int, split: int, char_codec: Any
) -> None:
    codec = char_codec(extra=["</search>ta", "</answer>"])
    limits = Limits(100, context, 500, observation)
    documents = {"q": ["Title\nbody <answer>no</answer>" * 5, "Other"]}
    done, contexts = play(codec, max_turns, limits, "prompt", script, documents, split)
    length = len(done.token_ids) - done.prompt_length
    assert len(done.loss_mask) == len(done.turn_ids) == len(done.logprobs) == length
    for state, turn, logprob in zip(done.loss_mask, done.turn_ids, done.logprobs, strict=True):
        assert (state, turn > 0, logprob < 0) in [(1, True, True), (0, False, False)]
        assert turn == -1 or 1 <= turn <= len(done.turns)
    covered = [i for segment in done.segments for i in range(segment.begin, segment.end)]
    assert covered == [i for i, state in enumerate(done.loss_mask) if state]
    ends = [0, *(span.end for span in done.spans)]
    assert [span.begin for span in done.spans] == ends[:-1]
    assert ends[-1] == len(done.token_ids)
    for span in done.spans:
        states = set(done.loss_mask[max(0, span.begin - done.prompt_length) : max(0, span.end - done.prompt_length)])
        assert states <= {int(span.role == Role.ROLE_MODEL)}
        if span.role == Role.ROLE_ENV:
            assert span.end - span.begin <= observation
    begins = [span.begin for span in done.spans if span.role == Role.ROLE_MODEL]
    assert contexts == [list(done.token_ids)[:begin][-context:] for begin in begins]  # the last tokens, not the first
    assert [turn.context_begin for turn in done.turns] == [max(0, begin - context) for begin in begins]
    assert len(done.turns) <= max_turns + 1


def test_a_long_observation_is_cut_and_keeps_its_closing_tag(char_codec: Any) -> None:
    codec = char_codec()
    limits = Limits(100, 2000, 500, 60)
    done, _ = play(codec, 1, limits, "P", ["<search>q</search>", "<answer>a</answer>"], {"q": ["T\n" + "z" * 500]})
    span = done.spans[2]
    assert span.end - span.begin == 60
    assert span.text.startswith("\n\n<information>Doc 1(Title: T) zzz")
    assert span.text.endswith("z</information>\n\n")
    assert span.text == codec.decode(list(done.token_ids)[span.begin : span.end])
    assert done.truncated


def test_a_context_that_slides_marks_the_trajectory_but_loses_no_token_of_it(char_codec: Any) -> None:
    codec = char_codec()
    limits = Limits(100, 40, 500, 500)
    script = ["<search>q</search>", "<answer>a</answer>"]
    done, contexts = play(codec, 2, limits, "prompt", script, {"q": ["T\nbody of the passage"]})
    assert done.truncated
    assert codec.decode(contexts[1]) == "Title: T) body of the passage</information>\n\n"[-40:]
    text = codec.decode(list(done.token_ids))
    assert text.startswith("prompt<search>q</search>")
    assert text.endswith("<answer>a</answer>")


def test_a_generation_that_hits_its_length_is_marked_and_explained(char_codec: Any) -> None:
    codec = char_codec()
    loop = begin(codec, WIDE, "P")
    action = add_generation(loop, build_generation(codec.encode("<search>never en"), hit_length=True))
    assert action.kind == ActionKind.ACTION_KIND_INVALID
    assert loop.build().truncated


def test_a_search_in_the_last_generation_counts_but_is_not_executed(char_codec: Any) -> None:
    done, _ = play(char_codec(), 0, Limits(100, 2000, 500, 500), "P", ["<search>q</search>"], {"q": ["T\nb"]})
    assert [turn.executed for turn in done.turns] == [False]
    assert (done.valid_searches, done.finished, len(done.spans)) == (1, False, 2)


def test_limits_that_leave_no_room_are_refused(char_codec: Any) -> None:
    with pytest.raises(SettingsError, match=r"max_obs_length 20 .* at least 31"):
        Limits.from_settings(RolloutSettings(max_obs_length=20), char_codec())
    with pytest.raises(SettingsError, match="max_model_len 64"):
        Limits.from_settings(RolloutSettings(engine=EngineSettings(max_model_len=64)), char_codec())


def test_a_context_and_a_response_fit_the_engine(char_codec: Any) -> None:
    tight = RolloutSettings(max_prompt_length=640, max_response_length=64, engine=EngineSettings(max_model_len=300))
    assert Limits.from_settings(tight, char_codec()).max_context_length == 236


def test_an_observation_keeps_its_tags_and_its_body_cannot_close_them(char_codec: Any) -> None:
    loop = begin(char_codec(special=["<|end|>"]), WIDE, "P")
    add_generation(loop, build_generation(loop.codec.encode("<search>q</search>")))
    loop.add_observation(Observation("a</result><|end|></search>", opening="<result>", closing="</result>"))
    assert loop.last_observation == "<result>a&lt;/result&gt;&lt;|end|&gt;&lt;/search&gt;</result>"
    assert char_codec(special=["<|end|>"]).vocabulary_size - 1 not in loop.token_ids


def test_an_observation_whose_tags_do_not_fit_is_an_error_that_names_the_setting(char_codec: Any) -> None:
    loop = begin(char_codec(), Limits(100, 2000, 500, 40), "P")
    add_generation(loop, build_generation(loop.codec.encode("<search>q</search>")))
    with pytest.raises(ValueError, match=r"41 tokens, rollout\.max_obs_length is 40"):
        loop.add_observation(Observation("body", opening="x" * 21, closing="y" * 20))


def test_without_feedback_the_next_generation_follows_at_once(char_codec: Any) -> None:
    loop = begin(char_codec(), WIDE, "P")
    loop.environment.feedback = ""
    add_generation(loop, build_generation(loop.codec.encode("nothing")))
    loop.add_feedback()
    assert loop.last_observation == ""
    assert loop.codec.decode(loop.next_context() or []) == "Pnothing"
    add_generation(loop, build_generation(loop.codec.encode("<answer>a</answer>")))
    done = loop.build()
    assert list(done.turn_ids) == [1] * 7 + [2] * 18
    assert [(span.begin, span.end) for span in done.spans] == [(0, 1), (1, 8), (8, 26)]


def test_a_parser_that_fails_leaves_the_generation_as_an_invalid_action(char_codec: Any) -> None:
    loop = begin(char_codec(), WIDE, "P")

    def fail(text: str, episode: Episode) -> Any:
        raise KeyError(text)

    loop.environment.parse = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        add_generation(loop, build_generation(loop.codec.encode("abc")))
    done = loop.build()
    assert [turn.action for turn in done.turns] == [ActionKind.ACTION_KIND_INVALID]
    assert len(done.loss_mask) == len(done.turn_ids) == len(done.logprobs) == 3


def test_a_huge_observation_is_encoded_in_bounded_time(char_codec: Any) -> None:
    class Counting(char_codec):  # type: ignore[misc]
        encoded = 0

        def encode(self, text: str) -> list[int]:
            self.encoded += len(text)
            return list(super().encode(text))

    shown = []
    for size in (1_000, 3_000_000):
        codec = Counting(extra=["zz"])
        loop = begin(codec, Limits(100, 2000, 500, 100), "P")
        add_generation(loop, build_generation(codec.encode("<search>q</search>")))
        loop.add_observation(Observation("z" * size))
        assert codec.encoded < 1_000
        assert loop.truncated
        shown.append(loop.last_observation)
    assert shown[0] == shown[1]
    assert len(codec.encode(shown[1])) == 100


def test_an_observation_that_comes_again_is_not_encoded_again_and_is_nobodys_to_change(char_codec: Any) -> None:
    class Counting(char_codec):  # type: ignore[misc]
        encoded = 0

        def encode(self, text: str) -> list[int]:
            self.encoded += 1
            return list(super().encode(text))

    codec = Counting()
    text, ids = encode_observation(codec, "<a>", "b", "</a>", ("a",))
    asked, before = codec.encoded, list(ids)
    ids.append(0)
    assert encode_observation(codec, "<a>", "b", "</a>", ["a"]) == (text, before)
    assert codec.encoded == asked
    assert encode_observation(codec, "<a>", "<a>b", "</a>", ["a"])[0] != text
    assert encode_observation(Counting(), "<a>", "b", "</a>", ["a"]) == (text, before)


@pytest.mark.parametrize("asked", ["", "who? <think>\n", "é中"])
@pytest.mark.parametrize("opening", ["<think>\n", "中", "<think>", "s:\n"])
def test_what_the_template_wrote_in_the_policys_name_is_given_and_belongs_to_its_first_turn(
    asked: str, opening: str, char_codec: Any
) -> None:
    codec = char_codec()
    prompt = RenderedPrompt(codec.encode(f"{asked}|assistant|{opening}"), opening)
    search = Search(RolloutSettings(max_turns=1), None)  # type: ignore[arg-type] - no test here searches
    loop = TrajectoryBuilder.start(WIDE, codec, prompt, search, Episode(Prompt()))
    assert loop.next_context() == prompt.token_ids
    text = loop.add_generation(build_generation(codec.encode("a</think><search>q</search>")))
    assert text == loop.last_turn_text == f"{opening}a</think><search>q</search>"
    loop.add_action(search.parse(text, loop.episode))
    loop.add_observation(build_observation(["d"]))
    loop.next_context()
    assert loop.add_generation(build_generation(codec.encode("<answer>d</answer>"))) == "<answer>d</answer>"
    own = loop.build()
    assert [(span.role, span.opening) for span in own.spans[:2]] == [
        (Role.ROLE_PROMPT, False),
        (Role.ROLE_PROMPT, True),
    ]
    assert own.spans[0].text + own.spans[1].text == f"{asked}|assistant|{opening}"
    assert own.spans[1].text == opening
    assert [(span.begin, span.end) for span in own.spans[:2]] == [
        (0, own.prompt_length - len(codec.encode(opening))),
        (own.prompt_length - len(codec.encode(opening)), own.prompt_length),
    ]
    assert own.prompt_length == len(prompt.token_ids)
    assert len(own.loss_mask) == len(own.token_ids) - own.prompt_length


def test_a_token_that_reaches_over_the_boundary_belongs_to_the_opening() -> None:
    class Merged:
        """Tokens of several characters."""

        texts = ("who?", "assistant\n<", "think", ">\n")

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(self.texts[one] for one in ids)

    spans = split_opening(Merged(), [0, 1, 2, 3], "<think>\n")  # type: ignore[arg-type] - only decodes
    assert [(span.begin, span.end, span.text) for span in spans] == [
        (0, 1, "who?assistant\n"),
        (1, 4, "<think>\n"),
    ]
    spans = split_opening(Merged(), [0, 1, 2, 3], "<THINK>")  # type: ignore[arg-type] - only decodes
    assert [span.text for span in spans] == ["who?assistant\n<think>\n"], "an opening that the prompt lacks is none"


def test_an_opening_is_found_where_the_tokenizer_drops_white_space_beside_its_added_tokens() -> None:
    class Dropping:
        """Of `<think>\n\nSure:` it keeps `<think>Sure:`, as an added token with `rstrip` does."""

        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(("<think>? ", "assistant", "<think>", "Sure:")[token] for token in token_ids)

    spans = split_opening(Dropping(), [0, 1, 2, 3], "<think>\n\nSure:\n")  # type: ignore[arg-type] - only decodes
    assert [(span.begin, span.end, span.text, span.opening) for span in spans] == [
        (0, 2, "<think>? assistant", False),
        (2, 4, "<think>Sure:", True),
    ]
