"""What a run gives to its policy's chat template besides the messages: variables, and the current date.

A prompt is the same prompt tomorrow: a template that asks for the date gets that of the run's start, also after a
resume, and everywhere: each prompt carries it from the trainer to the engine.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import yaml

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_runtime.settings import Settings
from forage_runtime.settings.data import NOT_VARIABLES


def keep_template_date(settings: Settings) -> Settings:
    """Return the settings with `data.template_date`: as given, else of the run's settings.yaml, else today's in UTC."""
    if settings.data.template_date is not None:
        return settings
    today = _read_run_date(settings) or datetime.now(UTC).date()
    return settings.model_copy(update={"data": settings.data.model_copy(update={"template_date": today})})


def build_template_values(settings: Settings) -> TemplateValues:
    """Build what a prompt of these settings carries."""
    data = keep_template_date(settings).data
    variables = json.dumps(data.apply_chat_template_kwargs, sort_keys=True) if data.apply_chat_template_kwargs else ""
    return TemplateValues(variables=variables, today=str(data.template_date))


def read_template_values(values: TemplateValues) -> tuple[dict[str, Any], date | None]:
    """Read variables and date; None: the machine's own date.

    Raises:
        ValueError: the variables are no JSON object of texts in Unicode, one of them is not the template's to read, or
            the date is none; names the field and its value.
    """
    try:
        variables = json.loads(values.variables or "{}")
        json.dumps(variables, ensure_ascii=False).encode()  # half a character, as "\ud800", is none for a tokenizer
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise ValueError(f"template.variables is {values.variables!r:.200}: expected a JSON object of Unicode texts")
    if taken := sorted(NOT_VARIABLES.intersection(variables)):
        raise ValueError(f"template.variables has {taken[0]!r}: expected variables of the template, Forage sets this")
    try:
        return variables, date.fromisoformat(values.today) if values.today else None
    except ValueError:
        raise ValueError(f"template.today is {values.today!r:.40}: expected a date, such as 2026-11-28") from None


def _read_run_date(settings: Settings) -> date | None:
    try:
        found = yaml.safe_load((settings.run.folder / "settings.yaml").read_bytes())["data"]["template_date"]
        return date.fromisoformat(str(found))
    except (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, RecursionError):
        return None  # a run that begins, or one of before
