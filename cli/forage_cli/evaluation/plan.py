"""The plan of an evaluation: questions, policies, methods and sampling; and the manifest that guards its folder."""

from __future__ import annotations

import functools
import json
import operator
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forage_cli.evaluation import methods
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.policies import EvaluatedPolicy
from forage_proto.v1.trajectory_pb2 import Document, Prompt, Purpose, Sampling, TemplateValues
from forage_records.questions import Question
from forage_runtime.errors import DataError, UserError
from forage_runtime.files import durable
from forage_runtime.settings import Settings

MANIFEST, ROWS = "evaluation.json", "results.parquet"
FORMAT = 1
ROUTES = "reward.routes"
RELEVANT_SETTINGS = (
    "rollout.max_turns",
    "rollout.max_start_length",
    "rollout.max_prompt_length",
    "rollout.max_response_length",
    "rollout.max_obs_length",
    "rollout.environments",
    "retriever.index",
    "retriever.mode",
    "retriever.topk",
    "retriever.rrf_k",
    "retriever.bm25_weight",
    "retriever.dense_weight",
    "retriever.ef_search",
    "retriever.nprobe",
    "retriever.refine",
    "retriever.rerank.depth",
    "rollout.engine.dtype",
    "rollout.engine.max_model_len",
    "rollout.engine.args",
    "rollout.engine.endpoint_model",
    "data.corpus",
    "data.template_date",
)


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling parameters. seed: that of the first sample of the first question."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True)
class Item:
    """A question for a policy with a method. index: position of the question among all that were read."""

    policy: EvaluatedPolicy
    method: Method
    question: Question
    index: int

    @property
    def key(self) -> tuple[str, str]:
        """Identity of its trajectory group: run_id and group_uid."""
        return self.policy.label, self.question.uid(self.method)


@dataclass(frozen=True)
class EvaluationPlan:
    """The whole work of an evaluation.

    Attributes:
        questions: position among all that were read → question.
        digest: that of the question files. limit: questions per file, None for all.
        settings: those that determine trajectories; empty where running services are used.
        template: what prompts carry for the policies' chat templates.
    """

    files: tuple[Path, ...]
    digest: str
    questions: Mapping[int, Question]
    policies: tuple[EvaluatedPolicy, ...]
    methods: tuple[Method, ...]
    sampling: SamplingPlan
    limit: int | None
    settings: Mapping[str, Any]
    template: TemplateValues

    def items(self, policies: Sequence[EvaluatedPolicy] | None = None) -> Iterator[Item]:
        """Iterate over all items, policy by policy."""
        for policy in self.policies if policies is None else policies:
            for method in self.methods:
                for index, question in self.questions.items():
                    if methods.is_applicable(method, question):
                        yield Item(policy, method, question, index)

    def build_prompt(self, item: Item, documents: Sequence[Document] = ()) -> Prompt:
        """Build the request to the rollout service. Every policy and method gets the same seeds."""
        run_id, group_uid = item.key
        return Prompt(
            run_id=run_id,
            group_uid=group_uid,
            data_source=item.question.data_source,
            messages=methods.build_messages(item.method, item.question, documents),
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
            template=self.template,
        )

    def to_manifest(self) -> dict[str, Any]:
        """Return the content of evaluation.json."""
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
            "template": {"variables": self.template.variables, "today": self.template.today},
        }


def select_relevant_settings(settings: Settings, sources: Iterable[str]) -> dict[str, Any]:
    """Select the settings that determine trajectories, and how those of these data sources are judged."""
    tree = settings.model_dump(mode="json")
    values = {name: functools.reduce(operator.getitem, name.split("."), tree) for name in RELEVANT_SETTINGS}
    routes = tree["reward"]["routes"]
    return values | {ROUTES: {source: routes[source] for source in sorted({*sources}) if source in routes}}


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


def claim_folder(folder: Path, plan: EvaluationPlan) -> EvaluationPlan:
    """Write the plan's manifest into the folder. Policies, methods and questions may be added to an earlier plan.

    Returns:
        The plan, with the template's date of the earlier one: a question's prompt is the same tomorrow.

    Raises:
        UserError: the folder holds another evaluation; the message says what differs.
        DataError: its manifest is damaged.
    """
    before = read_manifest(folder) if (folder / MANIFEST).exists() else plan.to_manifest()
    if today := before.get("template", {}).get("today"):
        plan = replace(plan, template=TemplateValues(variables=plan.template.variables, today=today))
    manifest = plan.to_manifest()
    if changed := _find_difference(before, manifest):
        raise UserError(
            f"{folder} holds an evaluation with {changed}: name another folder with --out, or replace it with --fresh"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if before != manifest:
        (folder / ROWS).unlink(missing_ok=True)  # the evaluation is unfinished again
    durable.write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    return plan


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an evaluation.

    Raises:
        DataError: the folder is no evaluation, or the manifest is damaged.
    """
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise DataError(f"{folder} was made by another version (format {found['format']}, not {FORMAT})")
    except FileNotFoundError:
        raise DataError(f"{folder} is no evaluation (it has no {MANIFEST}): run one with 'forage eval'") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged ({error}): start again with --fresh") from None
    return dict(found)


def _find_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first difference that keeps two manifests from sharing a folder; "" without one."""
    if before["questions"]["digest"] != now["questions"]["digest"]:
        return f"other questions ({', '.join(before['questions']['files'])}, or other content)"
    for section in ("sampling", "settings"):
        for name in before[section].keys() & now[section].keys():  # evaluations of before lack some
            was, is_ = before[section][name], now[section][name]
            if was != is_:
                return f"{name} = {was}, not {is_}"
    was, is_ = (manifest.get("template", {}).get("variables") or "{}" for manifest in (before, now))
    if was != is_:
        return f"data.apply_chat_template_kwargs = {was}, not {is_}"
    digests = {policy["label"]: policy["digest"] for policy in before["policies"]}
    for policy in now["policies"]:
        if digests.get(policy["label"], policy["digest"]) != policy["digest"]:
            return f"another policy under the name {policy['label']!r}"
    return ""
