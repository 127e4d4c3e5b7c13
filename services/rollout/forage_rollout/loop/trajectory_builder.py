"""The multi-turn loop of one trajectory as a state machine: no clock, no network, token in, token out.

The caller asks `next_context()`, generates, hands the result to `add_generation()`, lets the environment answer the
action, hands that to `add_observation()` or calls `add_feedback()`, and starts over until `next_context()` is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forage_common.errors import SettingsError
from forage_common.settings import RolloutSettings
from forage_common.text.observation import escape_tags, find_tag_names
from forage_common.v1.trajectory_pb2 import (
    ActionKind,
    PolicySegment,
    Role,
    Span,
    Status,
    Trajectory,
    Turn,
)
from forage_rollout.environments.environment import INVALID, Action, Environment, Episode, Observation
from forage_rollout.loop.generation import Generation
from forage_rollout.loop.tokens import TokenCodec
from forage_rollout.loop.turns import cut


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens; see `RolloutSettings`."""

    max_start_length: int
    max_context_length: int
    max_response_length: int
    max_obs_length: int

    @classmethod
    def of(cls, settings: RolloutSettings, codec: TokenCodec) -> Limits:
        """The limits of a run.

        Raises:
            SettingsError: a limit leaves no room for what must fit.
        """
        room = settings.engine.max_model_len - settings.max_response_length
        if room < 1:
            raise SettingsError(
                f"rollout.max_response_length {settings.max_response_length} leaves no room for a prompt within "
                f"rollout.engine.max_model_len {settings.engine.max_model_len}: make the latter larger"
            )
        empty = Observation("")
        least = len(codec.encode(empty.opening + empty.closing))
        if settings.max_obs_length < least:
            raise SettingsError(
                f"rollout.max_obs_length {settings.max_obs_length} is less than an empty observation: "
                f"make it at least {least}"
            )
        return cls(
            max_start_length=settings.max_start_length,
            max_context_length=min(settings.max_prompt_length, room),
            max_response_length=settings.max_response_length,
            max_obs_length=settings.max_obs_length,
        )


@dataclass
class Loop:
    """One trajectory in the making. `token_ids` grows; nothing in it is ever encoded a second time."""

    limits: Limits
    codec: TokenCodec
    environment: Environment
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

    @classmethod
    def start(
        cls,
        limits: Limits,
        codec: TokenCodec,
        prompt_ids: Sequence[int],
        environment: Environment,
        episode: Episode,
    ) -> Loop:
        """Begin from a rendered prompt, of which the last `max_start_length` tokens are kept."""
        kept = list(prompt_ids)[-limits.max_start_length :]
        truncated = len(kept) < len(prompt_ids)
        loop = cls(limits, codec, environment, episode, kept, truncated=truncated, prompt_length=len(kept))
        loop.spans.append(Span(role=Role.ROLE_PROMPT, begin=0, end=len(kept), text=codec.decode(kept)))
        return loop

    @property
    def searching(self) -> bool:
        """Whether the action of the last turn is still carried out."""
        return len(self.turns) <= self.environment.max_turns

    def next_context(self) -> list[int] | None:
        """What the next generation sees, or None when the trajectory is over."""
        if self.finished or len(self.turns) > self.environment.max_turns:
            return None
        context = self.token_ids[-self.limits.max_context_length :]
        self.truncated |= len(context) < len(self.token_ids)
        self.episode.turn = len(self.turns) + 1
        return context

    def add_generation(self, generation: Generation) -> Action:
        """Take a generation in; the environment says what it asks for.

        Raises:
            Exception: whatever the environment raised; the generation is kept, as an invalid action.
        """
        part = cut(generation.token_ids, self.codec.decode, self.environment.stops)
        index = len(self.turns) + 1
        begin = len(self.loss_mask)
        kept = generation.token_ids[: part.length]
        self._append(Role.ROLE_MODEL, kept, part.text)
        self.loss_mask += [1] * part.length
        self.turn_ids += [index] * part.length
        self.logprobs += generation.logprobs[: part.length]
        for version, epoch, first, last in generation.versions:
            last = min(last, part.length)
            if first < last:
                self.segments.append(PolicySegment(version=version, epoch=epoch, begin=begin + first, end=begin + last))
        self.episode.hit_length = generation.hit_length and not part.stopped
        self.truncated |= self.episode.hit_length
        turn = Turn(index=index, action=INVALID.kind, retrieval_status=Status.STATUS_UNSPECIFIED)
        self.turns.append(turn)
        action = self.environment.parse(self._without_end(part.text), self.episode)
        turn.action, turn.content, turn.tag = action.kind, action.content, action.tag
        self.finished = action.kind == ActionKind.ACTION_KIND_ANSWER
        return action

    def add_observation(self, observation: Observation) -> None:
        """Answer the action of the last turn.

        Raises:
            ValueError: its `opening` and `closing` alone are longer than `max_obs_length`.
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
        body = observation.body[: limit * self.codec.longest]  # more cannot fit; to encode megabytes takes seconds
        self.truncated |= len(body) < len(observation.body)
        reserved = (*self.environment.tags, *find_tag_names(opening), *find_tag_names(closing))
        text = f"{opening}{escape_tags(body, self.codec.special_tokens, reserved)}{closing}"
        ids = self.codec.encode(text)
        if len(ids) > limit:
            tail = self.codec.encode(closing)
            least = len(self.codec.encode(opening)) + len(tail)
            if least > limit:
                raise ValueError(
                    f"an observation begins and ends with {least} tokens, rollout.max_obs_length is {limit}"
                )
            head = ids[: limit - len(tail)]
            ids, text = head + tail, self.codec.decode(head) + closing
            self.truncated = True
        self._observe(ids, text)

    def add_feedback(self) -> None:
        """Explain the actions after an invalid one, where the environment has something to say."""
        text = self.environment.feedback
        ids = self.codec.encode(text)
        if not ids:
            return
        if len(ids) > self.limits.max_obs_length:
            ids = ids[: self.limits.max_obs_length]
            text = self.codec.decode(ids)
            self.truncated = True
        self._observe(ids, text)

    @property
    def observed(self) -> str:
        """The text that the policy was shown last; empty where it was a generation that came last."""
        last = self.spans[-1]
        return last.text if last.role == Role.ROLE_ENV else ""

    def trajectory(self) -> Trajectory:
        """Everything that the loop knows; identity, status, score and times are the caller's."""
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
            status=Status.STATUS_OK,
        )

    def _without_end(self, text: str) -> str:
        ends = (token for token in self.codec.special_tokens if token and text.endswith(token))
        return text.removesuffix(next(ends, ""))

    def _observe(self, ids: list[int], text: str) -> None:
        self._append(Role.ROLE_ENV, ids, text)
        self.loss_mask += [0] * len(ids)
        self.turn_ids += [-1] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def _append(self, role: Role.ValueType, ids: list[int], text: str) -> None:
        begin = len(self.token_ids)
        self.token_ids += ids
        self.spans.append(Span(role=role, begin=begin, end=len(self.token_ids), text=text))
