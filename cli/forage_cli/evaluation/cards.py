"""The card of an evaluation: its numbers with all that they depend on, so that somebody else can verify them."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from forage_cli.evaluation.measures import QuestionResult
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.plan import RELEVANT_SETTINGS, ROUTES, EvaluationPlan
from forage_cli.evaluation.policies import EvaluatedPolicy, Kind, hash_model_folder, hash_tokenizer
from forage_cli.evaluation.results import group_by_source, read_rows
from forage_cli.local.home import is_checkout
from forage_proto.v1.trajectory_pb2 import Provenance
from forage_records.questions import Question
from forage_runtime import __version__
from forage_runtime.errors import DataError, UserError
from forage_runtime.files import durable
from forage_runtime.settings import Settings
from forage_runtime.text.redaction import redact_url

SEARCHED = "searched.json"
_ELSEWHERE = ("retriever.index", "data.corpus", "data.template_date")
"""Settings that a card holds better: digests of what was searched, whatever its place, and the date of that day."""

_ENVIRONMENTS, _ENVIRONMENT = "rollout.environments", "environment of "
_RERANKER, _TOKENIZER = "retriever.rerank.model", "model.path"
_OTHER_MODELS = {_RERANKER: "reranker", _TOKENIZER: "tokenizer of the endpoint"}
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


class Inputs(_Part):
    """What the numbers of an evaluation depend on.

    settings: by dotted name, those of `RELEVANT_SETTINGS` and `reward.routes` of the data sources, without environments
        of one's own. own_code: SHA-256 of the file of each reward and environment of one's own; "" of a module.
    other_models: SHA-256 of the reranker, or its address where a server reranks, and of an endpoint's tokenizer.
    template_variables, template_date: what chat templates are given.
    """

    questions: CardQuestions
    policies: tuple[CardPolicy, ...] = Field(min_length=1)
    methods: tuple[Method, ...] = Field(min_length=1)
    sampling: CardSampling
    settings: dict[str, Any]
    own_code: dict[str, str]
    other_models: dict[Literal["retriever.rerank.model", "model.path"], str]
    template_variables: dict[str, Any]
    template_date: date

    @field_validator("settings")
    @classmethod
    def _check_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if unknown := settings.keys() - {*RELEVANT_SETTINGS, ROUTES}:
            raise ValueError(f"{min(unknown)} is none of the settings that numbers depend on")
        return settings

    def list_settings(self) -> list[str]:
        """List the settings of the evaluation as `key=value`, but for environments of one's own: --config has those."""
        has_own = any(what.startswith(_ENVIRONMENT) for what in self.own_code)
        values = {
            "reward.shadow": {},
            **{name: value for name, value in self.settings.items() if name != _ENVIRONMENTS or not has_own},
            "rollout.top_p": self.sampling.top_p,
            "rollout.top_k": self.sampling.top_k,
            "data.apply_chat_template_kwargs": self.template_variables,
            "data.template_date": str(self.template_date),
        }
        return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


class Card(Inputs):
    """A finished evaluation. searched: indexes that answered. made_with: of Forage."""

    format: Literal[1] = 1
    searched: tuple[Searched, ...]
    results: tuple[CardResult, ...] = Field(min_length=1)
    made_with: dict[str, str | None]
    made_on: date


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
    return Card(
        **dict(describe_inputs(plan, settings)),
        searched=read_searched(folder),
        results=tuple(results),
        made_with={"version": __version__, "commit": commit},
        made_on=datetime.now(UTC).date(),
    )


def describe_inputs(plan: EvaluationPlan, settings: Settings) -> Inputs:
    """Describe what the numbers of a plan depend on.

    Args:
        settings: of the services that answer.
    """
    sources = {question.data_source for question in plan.questions.values()}
    environments, routes, rewards = settings.rollout.environments, settings.reward.routes, settings.reward.user
    own = {
        f"{_ENVIRONMENT}{source}": name
        for source in sources & environments.keys()
        if ":" in (name := environments[source].name)
    }
    named = {part.name for source in sources & routes.keys() for part in routes[source]}
    own |= {f"reward {name}": rewards[name].function for name in named & rewards.keys()}
    kept = dict(plan.settings)
    kept[_ENVIRONMENTS] = {source: one for source, one in kept.get(_ENVIRONMENTS, {}).items() if ":" not in one["name"]}
    return Inputs(
        questions=_describe_questions(plan),
        policies=tuple(CardPolicy(label=p.label, source=_name_source(p), digest=p.digest) for p in plan.policies),
        methods=plan.methods,
        sampling=CardSampling(**asdict(plan.sampling)),
        settings=kept,
        own_code={what: _hash_code(name) for what, name in sorted(own.items())},
        other_models=_describe_other_models(plan, settings),
        template_variables=json.loads(plan.template.variables or "{}"),
        template_date=date.fromisoformat(plan.template.today),
    )


def _describe_other_models(plan: EvaluationPlan, settings: Settings) -> dict[Any, str]:
    rerank, models = settings.retriever.rerank, dict[str, str]()
    if rerank.model:
        models[_RERANKER] = redact_url(rerank.url) if rerank.url else hash_model_folder(Path(rerank.model))
    if any(policy.kind is Kind.ENDPOINT for policy in plan.policies):
        models[_TOKENIZER] = hash_tokenizer(settings.model.path)
    return models


def _name_source(policy: EvaluatedPolicy) -> str:
    """Name where a policy is; of a run by its version, as the newest one will be another."""
    if policy.run is None or policy.published is None:
        return policy.source
    return f"{policy.run}@{policy.published.name.partition('-')[0].removeprefix('v')}"


def _hash_code(name: str) -> str:
    file = Path(name.rpartition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


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
        raise DataError(f"{file} cannot be read ({error.strerror}): {_REMEDY}") from None
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


def list_differences(card: Inputs, now: Inputs) -> list[str]:
    """List in what inputs differ from those of a card; with none, the evaluation is the same one."""
    found, files = [], ", ".join(now.questions.files)
    if now.questions.digest != card.questions.digest:
        found.append(f"questions: {files} holds others ({_count(now.questions)}, the card {_count(card.questions)})")
    was, is_ = ({policy.label: policy.digest for policy in one.policies} for one in (card, now))
    found += [f"policy {label}: it is none of the card's ({', '.join(was)})" for label in is_.keys() - was.keys()]
    found += [
        f"policy {label}: other weights, configuration, tokenizer or template; --policy {label}=FOLDER names the card's"
        for label in was
        if is_.get(label) != was[label]
    ]
    for what in sorted(card.own_code.keys() | now.own_code.keys()):
        if card.own_code.get(what) != now.own_code.get(what):
            found.append(f"{what}: other code; --config names the settings with the card's")
    for setting in sorted(card.other_models.keys() | now.other_models.keys()):
        if card.other_models.get(setting) != now.other_models.get(setting):
            found.append(f"{setting}: not the card's {_OTHER_MODELS[setting]}; --config names the settings with it")
    before, after = _list_values(card), _list_values(now)
    for name in sorted(before.keys() | after.keys()):
        if name not in _ELSEWHERE and before.get(name) != after.get(name):
            found.append(f"{name}: {after.get(name)!r}, the card {before.get(name)!r}")
    return found


def hash_inputs(inputs: Inputs) -> str:
    """Hash inputs with SHA-256: one text for each evaluation that may be verified."""
    return hashlib.sha256(inputs.model_dump_json(include=set(Inputs.model_fields)).encode()).hexdigest()


def _list_values(inputs: Inputs) -> dict[str, Any]:
    template = {"apply_chat_template_kwargs": inputs.template_variables, "template date": str(inputs.template_date)}
    methods = [str(method) for method in inputs.methods]
    return {**inputs.settings, **inputs.sampling.model_dump(), **template, "methods": methods}


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

    Numbers agree where every question was answered both times, and each metric is in the other's interval.
    """
    results = {result.key: result for result in again.results}
    return [Verified(was, now := results.get(was.key), _compare(was, now)) for was in card.results]


def describe_searched(card: Card, again: Card) -> tuple[str, bool]:
    """Describe in what the searched indexes differ, and whether their corpora do; "" without a difference."""
    if card.searched == again.searched:
        return "", False
    if not card.searched or not again.searched:
        return "which corpus was searched is not known", False
    corpora = [{one.corpus_digest for one in each.searched} for each in (card, again)]
    if corpora[0] != corpora[1]:
        return "another corpus was searched than the card's: set data.corpus or retriever.index to the card's", True
    return "another index of the same corpus was searched than the card's", False


def _compare(was: CardResult, now: CardResult | None) -> Verdict:
    if now is None or was.em is None or was.questions != now.questions or was.failed_questions or now.failed_questions:
        return Verdict.DISAGREES
    pairs = [(was.em, now.em), (was.sub_em, now.sub_em), (was.f1, now.f1)]
    if was.answers == now.answers and all(_is_equal(one, other) for one, other in pairs):
        return Verdict.SAME
    is_other = was.answers == now.answers or not all(_is_within(one, other) for one, other in pairs)
    return Verdict.DISAGREES if is_other else Verdict.AGREES


def _is_equal(one: Interval | None, other: Interval | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(math.isclose(a, b, abs_tol=1e-9) for (_, a), (_, b) in zip(one, other, strict=True))


def _is_within(one: Interval | None, other: Interval | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.low <= other.mean <= one.high or other.low <= one.mean <= other.high


def _count(questions: CardQuestions) -> str:
    return ", ".join(f"{count} of {source}" for source, count in questions.sources.items())


def _describe_questions(plan: EvaluationPlan) -> CardQuestions:
    whole, sources = hashlib.sha256(), dict[str, int]()
    for index, question in plan.questions.items():
        whole.update(_hash_question(index, question))
        source = f"{question.data_source}/{question.split}"
        sources[source] = sources.get(source, 0) + 1
    files = tuple(map(str, plan.files))
    return CardQuestions(files=files, limit=plan.limit, sources=sources, digest=whole.hexdigest())


def _hash_question(index: int, question: Question) -> bytes:
    """Hash a question, and its place, by which its seed is chosen."""
    truth = question.ground_truth
    answers = [*truth.targets], truth.countdown_target, [*truth.countdown_numbers]
    messages = [[message.role, message.content] for message in question.messages]
    content = index, question.uid(""), question.text, messages, answers
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _hash_answers(rows: Iterable[QuestionResult]) -> str:
    answers = sorted((row.uid, row.answers, row.rights, row.failed) for row in rows)
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def find_commit() -> str | None:
    """Find the commit of the checkout that this package is installed from; None elsewhere."""
    if not is_checkout():
        return None
    folder = Path(__file__).resolve().parent
    command: Sequence[str] = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
