"""The card of an evaluation: its numbers with all that they depend on, so that somebody else can verify them."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from forage_cli.evaluation.measures import QuestionResult
from forage_cli.evaluation.plan import EvaluationPlan
from forage_cli.evaluation.policies import EvaluatedPolicy, Kind
from forage_cli.evaluation.results import group_by_source, read_rows
from forage_proto.v1.trajectory_pb2 import Provenance
from forage_records.questions import Question
from forage_runtime import __version__
from forage_runtime.errors import DataError, UserError
from forage_runtime.files import durable
from forage_runtime.settings import Settings

SEARCHED = "searched.json"
_ELSEWHERE = ("retriever.index", "data.corpus", "data.template_date")
"""Settings that the card holds better: digests of what was searched, whatever its place, and the template's date."""

_REMEDY = "give a file that 'forage eval … --card FILE' wrote"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(_Part):
    """A mean over questions with its 95 % interval."""

    mean: float
    low: float
    high: float


class CardQuestions(_Part):
    """The questions.

    limit: the first so many of every file; None: all. sources: number of questions by data source and split.
    digest: SHA-256 over the identity, the messages and the accepted answers of each, in any format of file.
    """

    files: tuple[str, ...]
    limit: int | None
    sources: dict[str, int]
    digest: str


class CardPolicy(_Part):
    """A policy. digest: of weights, configuration, tokenizer and chat template; of an endpoint, of its address."""

    label: str
    source: str
    digest: str


class CardSampling(_Part):
    """How answers were drawn."""

    samples: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_p: float
    top_k: int
    seed: int


class Searched(_Part):
    """An index that answered searches, by the digests of what it was made of."""

    corpus_digest: str
    encoder_digest: str
    index_digest: str
    mode: str


class CardResult(_Part):
    """The numbers of a policy with a method on a data source. answers: SHA-256 of the answers to all questions."""

    policy: str
    method: str
    data_source: str
    questions: int
    failed_questions: int
    em: Interval | None
    sub_em: Interval | None
    f1: Interval | None
    answers: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.policy, self.method, self.data_source


class Card(_Part):
    """A finished evaluation.

    routes: how answers of each data source are judged. template_date: the current date of chat templates.
    searched: indexes that answered. made_with: of Forage.
    """

    format: Literal[1] = 1
    questions: CardQuestions
    policies: tuple[CardPolicy, ...] = Field(min_length=1)
    methods: tuple[str, ...]
    sampling: CardSampling
    settings: dict[str, Any]
    routes: dict[str, Any]
    template_date: date
    searched: tuple[Searched, ...]
    results: tuple[CardResult, ...]
    made_with: dict[str, str | None]
    made_on: date

    def list_settings(self) -> list[str]:
        """List the settings of the evaluation as `key=value`."""
        drawn = {"rollout.top_p": self.sampling.top_p, "rollout.top_k": self.sampling.top_k}
        values = self.settings | drawn | {"reward.routes": self.routes, "data.template_date": str(self.template_date)}
        return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def require_known(policies: Iterable[EvaluatedPolicy]) -> None:
    """Return if a card can say what answers.

    Raises:
        UserError: running services answer, whose settings are not known here.
    """
    if any(policy.kind is Kind.RUNNING for policy in policies):
        raise UserError(
            "a card cannot say with which settings running services answer: name the policy with --policy, "
            "so that services are started for it"
        )


def build_card(
    plan: EvaluationPlan, settings: Settings, folder: Path, summary: Mapping[str, Any], commit: str | None = None
) -> Card:
    """Build the card of a finished evaluation.

    Args:
        settings: of the services that answered.
        folder: the evaluation's.
        summary: the content of its results.json.
        commit: that of Forage, where it is known.
    """
    rows = group_by_source(read_rows(folder))
    results = [
        CardResult(answers=_hash_answers(rows[key]), **{name: entry[name] for name in _COPIED})
        for entry in summary["results"]
        if (key := (entry["policy"], entry["method"], entry["data_source"])) in rows
    ]
    sources = {question.data_source for question in plan.questions.values()}
    routes = settings.model_dump(mode="json")["reward"]["routes"]
    return Card(
        questions=_describe_questions(plan),
        policies=tuple(CardPolicy(label=p.label, source=p.source, digest=p.digest) for p in plan.policies),
        methods=tuple(map(str, plan.methods)),
        sampling=CardSampling(**asdict(plan.sampling)),
        settings=dict(plan.settings),
        routes={source: routes[source] for source in sorted(sources) if source in routes},
        template_date=date.fromisoformat(plan.template.today),
        searched=read_searched(folder),
        results=tuple(results),
        made_with={"version": __version__, "commit": commit},
        made_on=datetime.now(UTC).date(),
    )


_COPIED = [name for name in CardResult.model_fields if name != "answers"]


def write_card(card: Card, file: Path) -> None:
    """Write a card as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    durable.write_atomically(file, card.model_dump_json(indent=2) + "\n")


def read_card(file: Path) -> Card:
    """Read a card.

    Raises:
        DataError: it cannot be read, or is no card; the first wrong field is named.
    """
    try:
        return Card.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}): give a file of 'forage eval … --card FILE'"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{file} is no card ({field}: {first['msg']}): {_REMEDY}") from None


def record_searched(folder: Path, source: Provenance) -> None:
    """Note in an evaluation's folder which index answers; nothing where the retriever does not say."""
    index = Searched(**{name: getattr(source, name) for name in Searched.model_fields})
    if index.corpus_digest and index not in (known := read_searched(folder)):
        content = [one.model_dump() for one in (*known, index)]
        durable.write_atomically(folder / SEARCHED, json.dumps(content, indent=2) + "\n")


def read_searched(folder: Path) -> tuple[Searched, ...]:
    """Read which indexes have answered an evaluation, in the order of their first search.

    Raises:
        DataError: the file is damaged.
    """
    file = folder / SEARCHED
    try:
        return TypeAdapter(tuple[Searched, ...]).validate_json(file.read_bytes()) if file.exists() else ()
    except ValidationError as error:
        raise DataError(f"{file} is damaged ({error.errors()[0]['msg']}): start again with --fresh") from None


def list_differences(card: Card, plan: EvaluationPlan) -> list[str]:
    """List in what the inputs of a plan differ from those of a card; with none, the plan is the same evaluation."""
    found, questions = [], _describe_questions(plan)
    if questions.digest != card.questions.digest:
        files = ", ".join(questions.files)
        found.append(f"questions: {files} holds others ({_count(questions)}, the card {_count(card.questions)})")
    digests = {policy.label: policy.digest for policy in plan.policies}
    for policy in card.policies:
        if digests.get(policy.label) != policy.digest:
            given = f"{policy.label}=FOLDER"
            found.append(
                f"policy {policy.label}: other weights, configuration, tokenizer or template (--policy {given})"
            )
    for name in sorted(card.settings.keys() | plan.settings.keys()):
        was, now = card.settings.get(name), plan.settings.get(name)
        if name not in _ELSEWHERE and was != now:
            found.append(f"{name}: {now!r}, the card {was!r}")
    return found


class Verdict(StrEnum):
    """How a number of a card compares with the same one, computed again."""

    SAME = "the same answers"
    AGREES = "agrees"
    DISAGREES = "disagrees"

    @property
    def holds(self) -> bool:
        return self is not Verdict.DISAGREES


class Verified(NamedTuple):
    """A number of a card, the same one computed again, and how they compare. again: None where it is missing."""

    card: CardResult
    again: CardResult | None
    verdict: Verdict


def verify_results(card: Card, again: Card) -> list[Verified]:
    """Compare each number of a card with the same one of another card.

    Numbers agree where all questions were answered both times, and one's exact match is in the other's interval.
    """
    results = {result.key: result for result in again.results}
    return [Verified(was, now := results.get(was.key), _compare(was, now)) for was in card.results]


def describe_searched(card: Card, again: Card) -> tuple[str, bool]:
    """Describe in what the searched indexes differ, and whether their corpora do; "" without a difference."""
    if card.searched == again.searched:
        return "", False
    corpora = [{one.corpus_digest for one in each.searched} for each in (card, again)]
    if corpora[0] != corpora[1]:
        return "another corpus was searched than the card's: set data.corpus or retriever.index to the card's", True
    return "another index of the same corpus was searched than the card's", False


def _compare(was: CardResult, now: CardResult | None) -> Verdict:
    if now is None or (was.questions, was.failed_questions) != (now.questions, now.failed_questions):
        return Verdict.DISAGREES
    if was.answers == now.answers:
        return Verdict.SAME
    if was.em is None or now.em is None:
        return Verdict.DISAGREES
    inside = was.em.low <= now.em.mean <= was.em.high or now.em.low <= was.em.mean <= now.em.high
    return Verdict.AGREES if inside else Verdict.DISAGREES


def _count(questions: CardQuestions) -> str:
    return ", ".join(f"{count} of {source}" for source, count in questions.sources.items())


def _describe_questions(plan: EvaluationPlan) -> CardQuestions:
    whole, sources = hashlib.sha256(), dict[str, int]()
    for question in plan.questions.values():
        whole.update(_hash_question(question))
        source = f"{question.data_source}/{question.split}"
        sources[source] = sources.get(source, 0) + 1
    files = tuple(map(str, plan.files))
    return CardQuestions(files=files, limit=plan.limit, sources=sources, digest=whole.hexdigest())


def _hash_question(question: Question) -> bytes:
    truth = question.ground_truth
    answers = [*truth.targets], truth.countdown_target, [*truth.countdown_numbers]
    content = question.uid(""), [[message.role, message.content] for message in question.messages], answers
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _hash_answers(rows: Iterable[QuestionResult]) -> str:
    answers = sorted((row.uid, row.answers, row.rights) for row in rows)
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def find_commit() -> str | None:
    """Find the commit of the checkout that this package is installed from; None elsewhere."""
    folder = Path(__file__).resolve().parent
    command: Sequence[str] = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
