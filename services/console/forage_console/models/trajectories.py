"""Pages Step, Trajectories, Trajectory and Group."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from forage_console.models.base import Author, Count, Estimate, GroupState, Model, Place, RowNumber, SortOrder


class TrajectoryRow(Model):
    """One trajectory of a list.

    Attributes:
        step: null for a trajectory of a validation.
        reason: why it has no score, or was not trained on.
        advantage: mean over the tokens that were trained on; search_advantage: over those of turns that search.
        mismatch: largest difference between the log-probabilities of trainer and engine.
        tokens: of the response.
        versions: first and last version of the policy that sampled it.
        snippet: text around the match of a search for text.
    """

    place: Place
    row: RowNumber
    step: int | None
    uid: str
    sample: int
    data_source: str
    question: str
    answer: str | None
    targets: list[str]
    status: str
    reason: str | None
    reward: float | None
    em: float | None
    advantage: float | None
    search_advantage: float | None
    mismatch: float | None
    trained: bool | None
    searches: int
    turns: int
    tokens: int | None
    truncated: bool
    finished: bool
    versions: tuple[int, int] | None
    snippet: str | None


class TrajectorySort(StrEnum):
    """Column to sort by; rows without a value come last."""

    PLACE = "place"
    REWARD = "reward"
    EM = "em"
    ADVANTAGE = "advantage"
    SEARCH_ADVANTAGE = "search_advantage"
    MISMATCH = "mismatch"
    SEARCHES = "searches"
    TURNS = "turns"
    TOKENS = "tokens"


class TrajectoryFilter(Model):
    """Filter of trajectories; what is null lets everything pass.

    Attributes:
        place: `steps` (all step files), step-<n>, or the label of a validation.
        right: whether the exact match is above 0.
        text: words that question or text contain, or a "quoted phrase".
        uid: a group, or a question in all epochs where it ends in "/".
    """

    place: str = Field("steps", max_length=300)
    step_min: Count | None = None
    step_max: Count | None = None
    source: list[str] = Field([], max_length=100)
    status: list[str] = Field([], max_length=100)
    reason: str | None = Field(None, max_length=2000)
    reward_min: float | None = None
    reward_max: float | None = None
    right: bool | None = None
    truncated: bool | None = None
    finished: bool | None = None
    trained: bool | None = None
    searches_min: Count | None = None
    searches_max: Count | None = None
    version_min: Count | None = None
    version_max: Count | None = None
    uid: str | None = Field(None, max_length=2000)
    text: str | None = Field(None, max_length=500)


class TrajectoryQuery(TrajectoryFilter):
    """A filter, with order and page."""

    sort: TrajectorySort = TrajectorySort.PLACE
    order: SortOrder = SortOrder.DESCENDING
    offset: Count = 0
    limit: int = Field(100, ge=1, le=500)


class TrajectoryPage(Model):
    """Rows of a page.

    Attributes:
        total, all: those that pass, and all of the place.
        indexed: share of the files that the full-text index covers; below 1 a search may be slower.
        loaded: share of the files that were read; below 1 more rows are to come.
    """

    rows: list[TrajectoryRow]
    total: int
    all: int
    seconds: float
    indexed: float
    loaded: float = 1.0


class Range(Model):
    low: float
    high: float


class Facets(Model):
    """Values that the filter's controls offer: value → number of trajectories."""

    places: list[Place]
    sources: dict[str, int]
    statuses: dict[str, int]
    reasons: dict[str, int]
    steps: Range | None
    reward: Range | None
    searches: Range | None
    versions: Range | None
    all: int


class Component(Model):
    """A component of a reward: the value of the rule, and what it adds to the reward."""

    name: str
    raw: float
    weighted: float


class Judgement(Model):
    """A score with its reason. detail: the rule that applied, or why there is no score."""

    reward: str
    status: str
    total: float | None
    components: list[Component]
    detail: str


class Passage(Model):
    """A retrieved passage. gold: whether it contains an accepted answer."""

    id: str
    title: str
    text: str
    score: float
    gold: bool


class TurnDetail(Model):
    """One turn: its action, and what the environment returned.

    Attributes:
        context_begin: tokens of prompt and response before it were cut off the context of this generation.
    """

    index: int
    action: str
    tag: str
    content: str
    executed: bool
    passages: list[Passage]
    retrieval_status: str | None
    mode: str
    index_digest: str
    is_partial: bool
    advantage: float | None
    context_begin: int = 0


class Piece(Model):
    """A tag, or a text within the tag `within` ("" outside of any)."""

    text: str
    within: str
    is_tag: bool


class Block(Model):
    """A text with one author. begin, end: its tokens, counted from the first of the response; null: of the prompt, or
    unknown."""

    author: Author
    begin: int | None
    end: int | None
    turn: int | None
    pieces: list[Piece]


class TokenColumns(Model):
    """One value for each token of the response; a column is null where the step did not compute it, and a value where
    the token has none.

    Attributes:
        mask: 1 on tokens that were trained on.
        turn: turn of a token of the policy, from 1; null on observations.
        version: policy version that sampled it.
        log_prob: by the trainer before its first update; engine_log_prob: by the engine when it sampled.
        mismatch: log_prob - engine_log_prob. kl: to the reference policy, k3 estimate.
    """

    text: list[str]
    id: list[int]
    mask: list[int]
    turn: list[int | None]
    version: list[int | None]
    advantage: list[float | None] | None
    value: list[float | None] | None
    returns: list[float | None] | None
    reward: list[float | None] | None
    log_prob: list[float | None] | None
    engine_log_prob: list[float | None] | None
    reference_log_prob: list[float | None] | None
    mismatch: list[float | None] | None
    kl: list[float | None] | None
    entropy: list[float | None] | None


class TimingBar(Model):
    """Seconds of a trajectory's life."""

    queued_s: float
    generate_s: float
    retrieve_s: float
    score_s: float
    total_s: float


class Address(Model):
    """A link to another trajectory."""

    place: Place
    row: RowNumber


class TrajectoryDetail(Model):
    """One trajectory, whole.

    Attributes:
        step_version: version of the policy that the step trained; staleness of a token is that minus its version.
        tokens: null for trajectories of validations, whose file has none.
        group: rows of the same group, in order of samples.
        estimator, baseline, deviation: as in GroupDetail.
        trace_url: null without a template in console.trace_url.
        replay: command that replays it in a shell.
    """

    summary: TrajectoryRow
    step_version: int | None
    prompt: str
    blocks: list[Block]
    tokens: TokenColumns | None
    turns: list[TurnDetail]
    judgement: Judgement
    validation: Judgement | None
    timings: TimingBar | None
    temperature: float | None
    replica: str
    trace_id: str
    trace_url: str | None
    previous: Address | None
    next: Address | None
    group: list[Address]
    estimator: str | None = None
    baseline: float | None = None
    deviation: float | None = None
    replay: str


class GroupRow(Model):
    """A group of a step. spread: largest minus smallest reward; reason: why it did not train."""

    uid: str
    data_source: str
    question: str
    state: GroupState
    reason: str | None
    rewards: list[float | None]
    mean: float | None
    spread: float | None
    samples: list[Address]


class Bin(Model):
    low: float
    high: float
    count: int


class StepDetail(Model):
    """One optimizer step.

    Attributes:
        metrics: null where its line is not written yet.
        is_saved: whether its trajectories are kept; without them groups and advantages are empty.
        advantages: histogram over tokens that were trained on.
        previous, next: the nearest saved steps.
    """

    step: int
    version: int | None
    metrics: dict[str, float | None] | None
    seconds: dict[str, float]
    guards: list[str]
    is_saved: bool
    trajectories: int
    groups: list[GroupRow]
    advantages: list[Bin]
    previous: int | None
    next: int | None


class GroupDetail(Model):
    """All samples of a prompt. baseline: what the estimator subtracted (mean of the rewards), deviation: what it
    divided by; null where it did not."""

    uid: str
    place: Place
    data_source: str
    question: str
    targets: list[str]
    state: GroupState
    reason: str | None
    estimator: str | None
    baseline: float | None
    deviation: float | None
    samples: list[TrajectoryDetail]


class QuestionPoint(Model):
    """One appearance of a question. kind: validation, watch or train; em, reward: means over its samples."""

    place: Place
    row: RowNumber
    step: int
    kind: str
    em: float | None
    reward: float | None
    answer: str | None
    samples: int


class QuestionRow(Model):
    """A question with its appearances in order of steps. changes: how often right became wrong or wrong right."""

    uid: str
    question: str
    targets: list[str]
    data_source: str
    is_watched: bool
    points: list[QuestionPoint]
    changes: int


class QuestionPage(Model):
    rows: list[QuestionRow]
    total: int


class QuestionText(Model):
    """What the policy wrote at one appearance of a question."""

    point: QuestionPoint
    blocks: list[Block]


class QuestionDetail(Model):
    question: QuestionRow
    texts: list[QuestionText]
    em: Estimate | None
