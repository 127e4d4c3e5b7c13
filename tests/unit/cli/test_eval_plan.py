"""What an evaluation's folder holds, against what is to be put into it."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from forage_cli.evaluation.plan import EvaluationPlan, SamplingPlan, claim_folder
from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_runtime.errors import UserError

SAMPLING = SamplingPlan(samples=1, temperature=0.0, top_p=1.0, top_k=-1, seed=0)


def make_plan(today: date, variables: str) -> EvaluationPlan:
    """A plan for services that are running, whose settings are not known here."""
    template = TemplateValues(variables=variables, today=str(today))
    return EvaluationPlan((), "digest", {}, (), (), SAMPLING, None, {}, template)


def test_an_evaluation_goes_on_with_its_date_and_not_with_other_variables(tmp_path: Path) -> None:
    first = make_plan(date(2026, 11, 28), '{"enable_thinking": false}')
    assert claim_folder(tmp_path / "e", first) == first
    later = make_plan(date(2026, 11, 29), first.template.variables)
    assert claim_folder(tmp_path / "e", later) == first, "a prompt is the same prompt tomorrow"
    for variables in ("", '{"enable_thinking": true}'):
        other = replace(later, template=TemplateValues(variables=variables, today=later.template.today))
        with pytest.raises(UserError, match=r"data\.apply_chat_template_kwargs = .*false.*, not "):
            claim_folder(tmp_path / "e", other)
