"""The arguments of `forage eval`, turned into a plan: question files, settings, policies and methods."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from forage_cli.datasets.question_file import read_and_warn
from forage_cli.evaluation import engines, policies
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.plan import EvaluationPlan, SamplingPlan, select_relevant_settings
from forage_cli.evaluation.policies import RUNNING, EvaluatedPolicy, Kind
from forage_cli.local import serving
from forage_cli.local.stack import Program
from forage_records.questions import Question
from forage_runtime.errors import UserError
from forage_runtime.files.template_values import build_template_values
from forage_runtime.settings import Settings

UNTRAINED, NONE, EVERY = "untrained", "none", "all"
"""Values of --baselines beside the methods: the policy before training, no baseline, every baseline."""


def split_arguments(arguments: Sequence[str], default: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Separate question files from settings ("key=value").

    Args:
        default: files where the arguments name none.

    Raises:
        UserError: no file is named.
    """
    settings = [text for text in arguments if "=" in text and not Path(text).exists()]
    files = [Path(text) for text in [text for text in arguments if text not in settings] or default]
    if not files:
        raise UserError("no questions: name Parquet files, for instance data/world/test.parquet")
    return files, settings


def parse_baselines(text: str) -> tuple[tuple[Method, ...], bool]:
    """Return the methods to run, `search` first, and whether the untrained policy is one of the baselines.

    Raises:
        UserError: a name is unknown.
    """
    known = [*(method for method in Method if method is not Method.SEARCH), UNTRAINED]
    names = {NONE: [], EVERY: known}.get(text, text.split(","))
    for name in names:
        if name not in known:
            raise UserError(f"--baselines names {name!r}: expected some of {', '.join(known)}; {EVERY}, or {NONE}")
    chosen = tuple(method for method in Method if method is Method.SEARCH or method in names)
    return chosen, UNTRAINED in names


def resolve_policies(named: Sequence[str], untrained: Path | None, with_untrained: bool) -> tuple[EvaluatedPolicy, ...]:
    """Resolve every --policy, and append the untrained policy where it is asked for.

    Raises:
        UserError, DataError: as `resolve_policy` and `find_untrained`; or two policies have one label.
    """
    resolved = [policies.resolve_policy(text) for text in named]
    if with_untrained or untrained:
        resolved.append(policies.find_untrained(resolved, untrained))
    return policies.check_labels(resolved)


def find_run_config(evaluated: Sequence[EvaluatedPolicy]) -> Path | None:
    """Return the settings of the first run among the policies: a run's policy is evaluated as the run was set up."""
    return next((policy.run / "settings.yaml" for policy in evaluated if policy.run), None)


def complete_policies(evaluated: tuple[EvaluatedPolicy, ...], settings: Settings) -> tuple[EvaluatedPolicy, ...]:
    """Add the default policy where none is named, and identify what running services serve.

    Raises:
        UserError: services are running and another policy is named, or none run and `running` is named.
        DataError: a run's policy is not signed as it must be.
    """
    if not any(policy.label != UNTRAINED for policy in evaluated):
        configured = settings.rollout.engine.endpoint or str(settings.model.path)
        default = RUNNING if serving.is_running(settings, Program.ROLLOUT) else configured
        evaluated = policies.check_labels([policies.resolve_policy(default), *evaluated])
    engines.check_policies(evaluated, settings)
    policies.verify_signatures(evaluated, settings.security)
    return tuple(
        asyncio.run(engines.identify_running(policy, settings)) if policy.kind is Kind.RUNNING else policy
        for policy in evaluated
    )


def make_plan(
    files: Sequence[Path],
    evaluated: tuple[EvaluatedPolicy, ...],
    methods: tuple[Method, ...],
    settings: Settings,
    samples: int,
    temperature: float | None,
    seed: int,
    limit: int | None,
) -> tuple[EvaluationPlan, Settings]:
    """Return the plan, and the settings of services that are started for it.

    Args:
        temperature: None = 0 for a single sample, else that of the settings.
        limit: questions of every file, None for all.

    Raises:
        UserError: the samples would all be the same, or there is no question.
        DataError: a file is missing or damaged.
    """
    if temperature is None:
        temperature = settings.rollout.temperature if samples > 1 else 0.0
    if samples > 1 and temperature == 0:
        raise UserError(f"--samples {samples} at temperature 0 would all be the same: give --temperature, or 1 sample")
    questions = read_and_warn(files)
    rows = _select_first(questions.rows, limit)
    if not rows:
        raise UserError(f"{', '.join(map(str, files))} has no questions")
    uses_running = any(policy.kind is Kind.RUNNING for policy in evaluated)
    if not uses_running:
        settings = engines.prepare_settings(settings, methods, [row.data_source for row in rows.values()])
    draw = SamplingPlan(samples, temperature, settings.rollout.top_p, settings.rollout.top_k, seed)
    # Settings of services that somebody else started are not known here, and do not enter the plan.
    known = {} if uses_running else select_relevant_settings(settings, (row.data_source for row in rows.values()))
    template = build_template_values(settings)
    plan = EvaluationPlan(tuple(files), questions.digest, rows, evaluated, methods, draw, limit, known, template)
    return plan, settings


def _select_first(rows: Sequence[Question], limit: int | None) -> dict[int, Question]:
    """Index in `rows` → question, for the first `limit` questions of every file."""
    counts: Counter[int] = Counter()
    selected = {}
    for index, row in enumerate(rows):
        counts[row.file] += 1
        if limit is None or counts[row.file] <= limit:
            selected[index] = row
    return selected
