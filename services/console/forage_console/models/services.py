"""Pages Health and Ask; replays."""

from __future__ import annotations

from pydantic import Field

from forage_console.models.base import Model, UnixSeconds
from forage_console.models.trajectories import Block, Component, Judgement, TurnDetail


class WaitRow(Model):
    """A wait of a service. is_idle: it waits for work; gives_up_in_s: null without a limit."""

    what: str
    on: str
    detail: str
    waited_s: float
    gives_up_in_s: float | None
    why_unlimited: str | None
    is_idle: bool
    count: int


class ServiceRow(Model):
    """One service. state: ready, slow, not ready, silent or not running; a note says how slow it is."""

    name: str
    state: str
    address: str
    waiting_for: dict[str, str]
    notes: list[str]
    waits: list[WaitRow]
    restarts: int
    log: list[str]


class ReplicaRow(Model):
    """An engine: what it serves, what it refuses and why."""

    name: str
    version: int | None
    epoch: int | None
    text: str
    is_out_of_service: bool


class QueueRow(Model):
    name: str
    entries: int
    bytes: int | None


class RedisRow(Model):
    used_bytes: int
    max_bytes: int | None
    policy: str
    clients: int


class HealthDetail(Model):
    """The services of a run now.

    Attributes:
        is_reachable: whether any service answers; where none does, problem says since when the run is over.
        version, epoch: of the announced policy.
    """

    checked: UnixSeconds
    is_reachable: bool
    problem: str | None
    services: list[ServiceRow]
    version: int | None
    epoch: int | None
    replicas: list[ReplicaRow]
    queues: list[QueueRow]
    redis: RedisRow | None


class AskRequest(Model):
    """A question for the served policy."""

    question: str = Field(min_length=1, max_length=4000)
    temperature: float = Field(0.0, ge=0, le=2)
    environment: str = Field("", max_length=100)


class AskStatus(Model):
    """Whether the run's policy can be asked now. problem: why not, with the remedy."""

    is_ready: bool
    problem: str | None
    version: int | None
    environments: list[str]


class AskEvent(Model):
    """One event of an answer's stream.

    Attributes:
        kind: turn, observation, end or error.
        text: what the policy wrote, what the environment returned, or the error's sentence.
    """

    kind: str
    turn: TurnDetail | None
    text: str
    answer: str | None
    judgement: Judgement | None
    version: int | None


class ReplayKind(Model):
    """score: the same text, by the running reward service; sample: the same prompt and seed, by the served policy."""

    kind: str = Field(pattern="^(score|sample)$")


class ReplayResult(Model):
    """A stored trajectory and its replay. divergence: where they diverge, "" where they do not."""

    kind: str
    version: int | None
    stored: Judgement
    new: Judgement
    changed: list[Component]
    divergence: str
    blocks: list[Block]
    is_repeatable: bool


class Explanation(Model):
    """The judgement of a trajectory explained. is_live: by the running reward service, else from what is stored."""

    text: str
    is_live: bool
