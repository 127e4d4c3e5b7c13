"""The multi-turn loop of one trajectory as a state machine: token in, token out, no clock, no network.

The caller generates from `next_context()`, passes the generation to `add_generation()`, lets the environment read its
action, passes that to `add_action()`, lets the environment respond to it, passes the observation to `add_observation()`
or calls `add_feedback()`, and repeats until `next_context()` is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forage_proto.v1.trajectory_pb2 import ActionKind, PolicySegment, Role, Score, Span, Status, Trajectory, Turn
from forage_rollout.environments.environment import INVALID, Action, Episode, Observation
from forage_rollout.environments.registry import AnyEnvironment
from forage_rollout.loop.generation import Generation, RenderedPrompt
from forage_rollout.loop.tokens import FileTokenizer, encode_observation
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RolloutSettings
from forage_runtime.text.observation import find_tag_names


@dataclass(frozen=True)
class CutGeneration:
    """The part of a generation that is kept.

    Attributes:
        length: tokens kept; the last one completes the stop text and may reach past it.
        text: of these tokens, ending exactly with the stop text where there is one.
        stopped: a stop text ended it.
    """

    length: int
    text: str
    stopped: bool


def cut_at_stop(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> CutGeneration:
    """Cut between tokens, after the first occurrence of the first of `stops` that occurs.

    Tokens are never split or encoded again: what was sampled is what is trained on.
    """
    text = decode(token_ids)
    stop = next((tag for tag in stops if tag in text), None)
    if stop is None:
        return CutGeneration(len(token_ids), text, stopped=False)
    low, high = 1, len(token_ids)
    if stop not in decode(token_ids[:-1]):  # the usual case: the engine stopped there itself
        low = high
    while low < high:  # binary search for the shortest prefix with the whole stop text
        middle = (low + high) // 2
        if stop in decode(token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    prefix = text if low == len(token_ids) else decode(token_ids[:low])
    return CutGeneration(low, prefix[: prefix.index(stop) + len(stop)], stopped=True)


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens; see `RolloutSettings`."""

    max_start_length: int
    max_context_length: int
    max_response_length: int
    max_obs_length: int

    @classmethod
    def from_settings(cls, settings: RolloutSettings, codec: FileTokenizer) -> Limits:
        """The limits of a run.

        Raises:
            SettingsError: a limit leaves no room for a prompt or an observation.
        """
        room = settings.engine.max_model_len - settings.max_response_length
        if room < 1:
            raise SettingsError(
                f"rollout.max_response_length {settings.max_response_length} leaves no room for a prompt within "
                f"rollout.engine.max_model_len {settings.engine.max_model_len}: make the latter larger"
            )
        empty = Observation("")
        minimum = len(codec.encode(empty.opening + empty.closing))
        if settings.max_obs_length < minimum:
            raise SettingsError(
                f"rollout.max_obs_length {settings.max_obs_length} is less than an empty observation: "
                f"make it at least {minimum}"
            )
        return cls(
            max_start_length=settings.max_start_length,
            max_context_length=min(settings.max_prompt_length, room),
            max_response_length=settings.max_response_length,
            max_obs_length=settings.max_obs_length,
        )


def split_opening(codec: FileTokenizer, token_ids: Sequence[int], opening: str) -> list[Span]:
    """The spans of a prompt: what it says, and its end that the chat template wrote in the policy's name, if any.

    Where a token reaches over the boundary, the opening's span begins with that token, and its text where it begins.
    White space may differ: tokenizers drop it beside added tokens, such as the newline after `<think>`.
    """
    text = codec.decode(token_ids)
    found = re.search(r"\s*".join(map(re.escape, opening.split())) + r"\s*\Z", text) if opening else None
    if found is None:
        return [Span(role=Role.ROLE_PROMPT, begin=0, end=len(token_ids), text=text)]
    before = len(text) - len(opening) if text.endswith(opening) else found.start()
    begin = next(n for n in range(len(token_ids) - 1, -1, -1) if len(codec.decode(token_ids[:n])) <= before)
    return [
        Span(role=Role.ROLE_PROMPT, begin=0, end=begin, text=text[:before]),
        Span(role=Role.ROLE_PROMPT, begin=begin, end=len(token_ids), text=text[before:], opening=True),
    ]


@dataclass
class TrajectoryBuilder:
    """One growing trajectory.

    `token_ids` is only appended to and never encoded again from text: encoding sampled text again may give other
    tokens than those that were sampled, and their log-probabilities would be wrong in the loss. `loss_mask`, `turn_ids`
    and `logprobs` run over the response, that is `token_ids[prompt_length:]`. The next generation sees the tokens from
    `context_begin` on. `score` is one that a worker has given.
    """

    limits: Limits
    codec: FileTokenizer
    environment: AnyEnvironment
    episode: Episode
    token_ids: list[int]
    truncated: bool = False
    finished: bool = False
    turns: list[Turn] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    prompt_length: int = 0
    loss_mask: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[PolicySegment] = field(default_factory=list)
    context_begin: int = 0
    score: Score | None = None

    @classmethod
    def start(
        cls,
        limits: Limits,
        codec: FileTokenizer,
        prompt: RenderedPrompt,
        environment: AnyEnvironment,
        episode: Episode,
    ) -> TrajectoryBuilder:
        """Begin with a rendered prompt, of which the last `max_start_length` tokens are kept."""
        kept = prompt.token_ids[-limits.max_start_length :]
        truncated = len(kept) < len(prompt.token_ids)
        builder = cls(limits, codec, environment, episode, kept, truncated=truncated, prompt_length=len(kept))
        builder.spans += split_opening(codec, kept, prompt.opening)
        return builder

    @property
    def may_act(self) -> bool:
        """Whether the action of the last turn is carried out; after `max_turns` it is not."""
        return len(self.turns) <= self.environment.max_turns

    def next_context(self) -> list[int] | None:
        """The tokens that the next generation sees; None at the end of the trajectory."""
        if self.finished or len(self.turns) > self.environment.max_turns:
            return None
        self.context_begin = max(0, len(self.token_ids) - self.limits.max_context_length)
        context = self.token_ids[self.context_begin :]
        self.truncated |= self.context_begin > 0
        self.episode.turn = len(self.turns) + 1
        return context

    def set_context(self, context: Sequence[int], opening: str = "") -> None:
        """Make this the context of the next generation, where somebody else than the loop wrote it.

        What it has beyond the tokens of the last generation and its context is observed. A context that does not begin
        with these is observed whole, behind them, and its generation sees nothing before it (`Turn.context_begin`): so
        every token that was sampled stays where it was sampled. Before the first generation it becomes the prompt.

        Args:
            opening: of a prompt, as `RenderedPrompt.opening`.
        """
        if not self.turns:
            self.token_ids, self.prompt_length, self.truncated = list(context), len(context), False
            self.spans = split_opening(self.codec, self.token_ids, opening)
            return
        before = self.token_ids[self.context_begin :]
        new = list(context)
        if new[: len(before)] == before:
            new = new[len(before) :]
            self.turns[-1].executed, self.turns[-1].retrieval_status = True, Status.STATUS_OK
        else:
            self.context_begin = len(self.token_ids)
        if new:
            self._append_observation(new, self.codec.decode(new))

    def add_generation(self, generation: Generation, stops: Sequence[str] = ()) -> str:
        """Append a generation, as an invalid action; returns the text in which the environment reads another one.

        Args:
            stops: texts that end it besides the environment's.
        """
        part = cut_at_stop(generation.token_ids, self.codec.decode, (*self.environment.stops, *stops))
        index = len(self.turns) + 1
        begin = len(self.loss_mask)
        kept = generation.token_ids[: part.length]
        self._append(Role.ROLE_MODEL, kept, part.text)
        self.loss_mask += [1] * part.length
        self.turn_ids += [index] * part.length
        self.logprobs += generation.logprobs[: part.length]
        for version, epoch, first, last in generation.versions:
            last = min(last, part.length)  # tokens after the cut are in no segment
            if first < last:
                self.segments.append(PolicySegment(version=version, epoch=epoch, begin=begin + first, end=begin + last))
        self.episode.hit_length = generation.hit_length and not part.stopped
        self.truncated |= self.episode.hit_length
        # Before the environment parses: its code may raise, and the tokens are there already.
        turn = Turn(
            index=index,
            action=INVALID.kind,
            retrieval_status=Status.STATUS_UNSPECIFIED,
            context_begin=self.context_begin,
        )
        self.turns.append(turn)
        return self._strip_end_token(self.last_turn_text)

    def add_action(self, action: Action) -> Action:
        """Record the action of the last generation; returns it."""
        turn = self.turns[-1]
        turn.action, turn.content, turn.tag = action.kind, action.content, action.tag
        self.finished = action.kind == ActionKind.ACTION_KIND_ANSWER
        return action

    def add_observation(self, observation: Observation) -> None:
        """Append the observation that answers the last action; its body is cut to `max_obs_length` tokens in all.

        Raises:
            ValueError: `opening` and `closing` alone are longer than `max_obs_length`.
        """
        turn = self.turns[-1]
        turn.executed = True
        turn.documents.extend(observation.documents)
        turn.index_digest = observation.provenance.index_digest
        turn.provenance.CopyFrom(observation.provenance)
        turn.partial_retrieval = observation.partial
        turn.retrieval_status = Status.STATUS_OK if observation.succeeded else Status.STATUS_INVALID_INPUT
        opening, closing = observation.opening, observation.closing
        limit = self.limits.max_obs_length
        body = observation.body[
            : limit * self.codec.max_token_chars
        ]  # no more can fit, and encoding megabytes takes seconds
        self.truncated |= len(body) < len(observation.body)
        # Retrieved text must not be able to open or close a block: it could end the observation or fake an action.
        reserved = (*self.environment.tags, *find_tag_names(opening), *find_tag_names(closing))
        text, ids = encode_observation(self.codec, opening, body, closing, reserved)
        if len(ids) > limit:
            tail = self.codec.encode(closing)
            minimum = len(self.codec.encode(opening)) + len(tail)
            if minimum > limit:
                raise ValueError(
                    f"an observation begins and ends with {minimum} tokens, rollout.max_obs_length is {limit}"
                )
            head = ids[: limit - len(tail)]
            ids, text = head + tail, self.codec.decode(head) + closing
            self.truncated = True
        self._append_observation(ids, text)

    def add_feedback(self) -> None:
        """Append the environment's feedback to an invalid action, where it has one."""
        text = self.environment.feedback
        ids = self.codec.encode(text)
        if not ids:
            return
        if len(ids) > self.limits.max_obs_length:
            ids = ids[: self.limits.max_obs_length]
            text = self.codec.decode(ids)
            self.truncated = True
        self._append_observation(ids, text)

    @property
    def last_turn_text(self) -> str:
        """The text of the last generation; the opening that the chat template wrote belongs to the first one."""
        *_, before, last = self.spans
        return before.text + last.text if before.opening else last.text

    @property
    def last_generation(self) -> tuple[list[int], str]:
        """The tokens of the generation that came last, and their text without a control token at its end."""
        span = self.spans[-1]
        return self.token_ids[span.begin : span.end], self._strip_end_token(span.text)

    @property
    def last_observation(self) -> str:
        """The text of the observation or feedback that came last; empty after a generation."""
        last = self.spans[-1]
        return last.text if last.role == Role.ROLE_ENV else ""

    def build(self) -> Trajectory:
        """The trajectory so far; the caller adds identity, status, score and timings."""
        kinds = [turn.action for turn in self.turns]
        return Trajectory(
            token_ids=self.token_ids,
            prompt_length=self.prompt_length,
            loss_mask=self.loss_mask,
            turn_ids=self.turn_ids,
            logprobs=self.logprobs,
            segments=self.segments,
            spans=self.spans,
            turns=self.turns,
            finished=self.finished,
            truncated=self.truncated,
            valid_actions=sum(kind != ActionKind.ACTION_KIND_INVALID for kind in kinds),
            valid_searches=sum(kind == ActionKind.ACTION_KIND_SEARCH for kind in kinds),
            score=self.score,
            status=Status.STATUS_OK,
        )

    def _strip_end_token(self, text: str) -> str:
        ends = (token for token in self.codec.special_tokens if token and text.endswith(token))
        return text.removesuffix(next(ends, ""))

    def _append_observation(self, ids: list[int], text: str) -> None:
        self._append(Role.ROLE_ENV, ids, text)
        # Observed, not sampled: no loss, no turn of the policy, no log-probability.
        self.loss_mask += [0] * len(ids)
        self.turn_ids += [-1] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def _append(self, role: Role.ValueType, ids: list[int], text: str) -> None:
        begin = len(self.token_ids)
        self.token_ids += ids
        self.spans.append(Span(role=role, begin=begin, end=len(self.token_ids), text=text))
