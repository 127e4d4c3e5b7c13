"""What an evaluation does: which questions, which policies, by which methods; and what may not change midway."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forage_cli.evaluation import methods
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.policies import EvaluatedPolicy
from forage_common.errors import DataError, UserError
from forage_common.files import durable
from forage_common.files.questions import Question
from forage_common.settings import Settings
from forage_common.v1.trajectory_pb2 import Document, Prompt, Purpose, Sampling

MANIFEST, ROWS = "evaluation.json", "results.parquet"
FORMAT = 1
_ROLLOUT_SETTINGS = (
    "max_turns",
    "max_start_length",
    "max_prompt_length",
    "max_response_length",
    "max_obs_length",
    "environments",
)
_RETRIEVER_SETTINGS = ("index", "mode", "topk")


@dataclass(frozen=True)
class SamplingPlan:
    """How samples are drawn. seed: of the first sample of the first question."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True)
class Item:
    """A question, put to a policy by a method. index: of the question among those that were read."""

    policy: EvaluatedPolicy
    method: Method
    question: Question
    index: int

    @property
    def key(self) -> tuple[str, str]:
        """What its group of trajectories is called: run_id and group_uid."""
        return self.policy.label, self.question.uid(self.method)


@dataclass(frozen=True)
class EvaluationPlan:
    """Everything that an evaluation is asked for.

    Attributes:
        questions: those that are asked, by their place among all that were read.
        digest: of the question files. limit: of questions a file, None for all.
        circumstances: settings that decide what a trajectory is; empty where services of somebody else are used.
    """

    files: tuple[Path, ...]
    digest: str
    questions: Mapping[int, Question]
    policies: tuple[EvaluatedPolicy, ...]
    methods: tuple[Method, ...]
    sampling: SamplingPlan
    limit: int | None
    settings: Mapping[str, Any]

    def items(self, policies: Sequence[EvaluatedPolicy] | None = None) -> Iterator[Item]:
        """Everything that is to be done, policy by policy."""
        for policy in self.policies if policies is None else policies:
            for method in self.methods:
                for index, question in self.questions.items():
                    if methods.is_applicable(method, question):
                        yield Item(policy, method, question, index)

    def build_prompt(
        self, item: Item, documents: Sequence[Document] = (), special_tokens: Sequence[str] = ()
    ) -> Prompt:
        """What the rollout service is asked. Every policy and method is given the same seeds."""
        run_id, group_uid = item.key
        return Prompt(
            run_id=run_id,
            group_uid=group_uid,
            data_source=item.question.data_source,
            messages=methods.build_messages(item.method, item.question, documents, special_tokens),
            ground_truth=item.question.ground_truth,
            samples=self.sampling.samples,
            sampling=Sampling(
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                seed=self.sampling.seed + item.index * self.sampling.samples,
            ),
            purpose=Purpose.PURPOSE_VALIDATION,
            environment=methods.choose_environment(item.method),
        )

    def to_manifest(self) -> dict[str, Any]:
        """What is kept beside the results."""
        return {
            "format": FORMAT,
            "questions": {
                "files": [str(file) for file in self.files],
                "digest": self.digest,
                "count": len(self.questions),
                "limit": self.limit,
            },
            "policies": [{"label": p.label, "source": p.source, "digest": p.digest} for p in self.policies],
            "methods": [str(method) for method in self.methods],
            "sampling": asdict(self.sampling),
            "settings": dict(self.settings),
        }


def select_relevant_settings(settings: Settings) -> dict[str, Any]:
    """The settings that decide what a trajectory is."""
    rollout = settings.rollout.model_dump(mode="json", include=set(_ROLLOUT_SETTINGS))
    retriever = settings.retriever.model_dump(mode="json", include=set(_RETRIEVER_SETTINGS))
    named = {f"rollout.{name}": rollout[name] for name in _ROLLOUT_SETTINGS}
    named |= {f"retriever.{name}": retriever[name] for name in _RETRIEVER_SETTINGS}
    return named | {"data.corpus": str(settings.data.corpus)}


def remove_evaluation(folder: Path) -> None:
    """Remove the folder of an evaluation, where there is one.

    Raises:
        UserError: the folder holds something else.
    """
    if not folder.exists():
        return
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is no evaluation, --fresh does not remove it: name another folder with --out")
    shutil.rmtree(folder)


def claim_folder(folder: Path, plan: EvaluationPlan) -> None:
    """Take the folder for the plan. More policies, methods and questions may join what is done there already.

    Raises:
        UserError: it holds an evaluation of something else; says what differs.
        DataError: its manifest is damaged.
    """
    manifest = plan.to_manifest()
    before = read_manifest(folder) if (folder / MANIFEST).exists() else manifest
    if changed := _find_difference(before, manifest):
        raise UserError(
            f"{folder} holds an evaluation with {changed}: name another folder with --out, or begin anew with --fresh"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if before != manifest:
        (folder / ROWS).unlink(missing_ok=True)  # it is unfinished once more
    durable.write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What an evaluation's folder says of itself.

    Raises:
        DataError: it is none.
    """
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise DataError(f"{folder} was made by another version (format {found['format']}, not {FORMAT})")
    except FileNotFoundError:
        raise DataError(f"{folder} is no evaluation (it has no {MANIFEST}): make one with 'forage eval'") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged ({error}): begin anew with --fresh") from None
    return dict(found)


def _find_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first thing in which two manifests do not go together, in words."""
    if before["questions"]["digest"] != now["questions"]["digest"]:
        return f"other questions ({', '.join(before['questions']['files'])}, or another content)"
    for section in ("sampling", "settings"):
        for name in before[section].keys() | now[section].keys():
            was, is_ = before[section].get(name), now[section].get(name)
            if was != is_:
                return f"{name} = {was}, not {is_}"
    digests = {policy["label"]: policy["digest"] for policy in before["policies"]}
    for policy in now["policies"]:
        if digests.get(policy["label"], policy["digest"]) != policy["digest"]:
            return f"another policy under the name {policy['label']!r}"
    return ""
