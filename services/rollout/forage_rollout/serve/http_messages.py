"""Requests, replies and server-sent events of the HTTP API as Pydantic models."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from google.protobuf.json_format import MessageToDict
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from forage_proto.v1.rollout_pb2 import RunStreamResponse
from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    ChatMessage,
    Prompt,
    Purpose,
    Sampling,
    Status,
    Trajectory,
    TrajectoryGroup,
)
from forage_queue.rollout.dispatcher import MAX_SAMPLES
from forage_rollout.environments.loading import BUILT_IN, EXPECTED
from forage_rollout.prompt_checks import MAX_TOP_K
from forage_runtime.files.template_values import build_template_values
from forage_runtime.settings import Settings
from forage_runtime.text.enums import name_value
from forage_runtime.text.search_prompt import format_search_prompt

_ACTION_NAMES = {
    ActionKind.ACTION_KIND_INVALID: "invalid",
    ActionKind.ACTION_KIND_SEARCH: "search",
    ActionKind.ACTION_KIND_ANSWER: "answer",
}


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair: send whole characters") from None
    return text


Text = Annotated[str, AfterValidator(_check_text)]
SomeText = Annotated[str, Field(min_length=1), AfterValidator(_check_text)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Message(_StrictModel):
    role: SomeText
    content: Text


class Ask(_StrictModel):
    """A question for the policy, and how to sample its answer."""

    question: SomeText | None = Field(None, description="put into the instruction that the policy knows")
    messages: list[Message] | None = Field(None, min_length=1, description="instead of question: the chat as it is")
    data_source: Text | None = Field(None, description="selects the environment; unset = that of the first reward")
    environment: Text = Field("", description="a built-in environment instead of the data source's")
    samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=MAX_TOP_K, description="-1 or 0 = all")
    seed: int = Field(0, ge=0, lt=2**63, description="of the first sample, the next ones follow; 0 = unseeded")
    timeout_s: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 = the service's own limit")
    stream: bool = Field(True, description="server-sent events as they happen; false = one reply at the end")

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, name: str) -> str:
        if name and name not in BUILT_IN:
            raise ValueError(f"expected {EXPECTED}, not {name!r}")
        return name

    @model_validator(mode="after")
    def _check_one_of_both(self) -> Ask:
        if (self.question is None) == (self.messages is None):
            raise ValueError("question, messages: expected exactly one of both")
        return self

    def build_prompt(self, settings: Settings) -> Prompt:
        """The prompt that the loop runs."""
        chat = self.messages or [Message(role="user", content=format_search_prompt(self.question or ""))]
        return Prompt(
            run_id=settings.run.id,
            group_uid=f"ask/{uuid.uuid4().hex}",
            data_source=self.data_source or next(iter(settings.reward.routes), ""),
            messages=[ChatMessage(role=message.role, content=message.content) for message in chat],
            samples=self.samples,
            sampling=Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed),
            purpose=Purpose.PURPOSE_ASK,
            environment=self.environment,
            timeout_s=self.timeout_s,
            template=build_template_values(settings),
        )


class Answer(BaseModel):
    """The policy's answer to a question."""

    answer: str | None = Field(description="of the first sample; null where it has none")
    answers: list[str | None] = Field(description="of every sample")
    status: list[str] = Field(description="of every sample: OK, or why it has no answer")
    group: dict[str, Any] = Field(description="forage.v1.TrajectoryGroup as protobuf JSON: the whole trajectories")


class TurnEvent(BaseModel):
    """Event `turn`: a generation of the policy."""

    sample: int
    turn: int
    action: str = Field(description="search, answer or invalid")
    tag: str = Field(description="of the action block")
    content: str = Field(description="the query or the answer")
    text: str = Field(description="the whole generation")


class ObservationEvent(BaseModel):
    """Event `observation`: the text that the policy observes after its action."""

    sample: int
    turn: int
    text: str
    documents: list[dict[str, Any]] = Field(description="{id, contents, score}, best first")
    status: str = Field(description="of the retrieval")


class Take(_StrictModel):
    """A worker asks for a session."""

    wait_s: float = Field(0.0, ge=0, le=60, description="how long it may take until one waits")


class Task(BaseModel):
    """What the agent of a session gets to know."""

    id: str = Field(description="names the question and the sample; the same when a session is begun again")
    data_source: str
    messages: list[Message]
    targets: list[str] = Field(description="accepted answers")


class Taken(BaseModel):
    """A session for a worker."""

    id: str
    key: str = Field(description="bearer token of its requests, and of no others")
    base_url: str = Field(description="path of its requests, as OpenAI clients' base_url is")
    task: Task


class Problem(BaseModel):
    """Why a request was refused."""

    message: str
    type: str
    param: str | None = Field(None, description="the invalid field")


class Refusal(BaseModel):
    error: Problem


def build_answer(group: TrajectoryGroup) -> Answer:
    """The reply for a group."""
    answers = [_find_answer(trajectory) for trajectory in group.trajectories]
    status = [name_value(Status, t.status) for t in group.trajectories]
    whole = MessageToDict(group, preserving_proto_field_name=True)
    return Answer(answer=answers[0] if answers else None, answers=answers, status=status, group=whole)


def build_event(response: RunStreamResponse) -> tuple[str, BaseModel]:
    """The name and the content of a server-sent event."""
    kind = response.WhichOneof("event")
    if kind == "group":
        return "done", build_answer(response.group)
    if kind == "acted":
        turn = response.acted
        return "turn", TurnEvent(
            sample=response.sample,
            turn=turn.index,
            action=_ACTION_NAMES.get(turn.action, "invalid"),
            tag=turn.tag,
            content=turn.content,
            text=response.text,
        )
    turn = response.observed
    return "observation", ObservationEvent(
        sample=response.sample,
        turn=turn.index,
        text=response.text,
        documents=[{"id": d.id, "contents": d.contents, "score": d.score} for d in turn.documents],
        status=name_value(Status, turn.retrieval_status),
    )


def _find_answer(trajectory: Trajectory) -> str | None:
    answers = [t.content for t in trajectory.turns if t.action == ActionKind.ACTION_KIND_ANSWER]
    return answers[-1] if answers else None
