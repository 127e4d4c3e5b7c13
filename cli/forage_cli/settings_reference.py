"""Descriptions of all settings, read from their models, for the reference page and `forage config explain`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic_core import PydanticUndefined, to_jsonable_python

from forage_runtime.errors import SettingsError
from forage_runtime.settings.base import Section
from forage_runtime.settings.loading import RENAMED
from forage_runtime.settings.tree import Settings
from forage_runtime.verl_keys import find_counterpart

_UNITS = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_mib": "MiB",
    "_gib": "GiB",
    "_length": "tokens",
    "_len": "tokens",
    "_len_per_gpu": "tokens",
    "freq": "steps",
    "_steps": "steps",
    "batch_size": "prompts",
}
"""End of a setting's name → its unit."""

_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    date: "date",
    Path: "path",
    NoneType: "null",
}
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class SettingDescription:
    """One setting.

    Attributes:
        name: path from the root, such as trainer.max_staleness; <name> stands for any key of a map, <n> for an item.
        type: with its limits, such as "integer ≥ 0", or the choices, such as "wait | drop".
        default: as YAML has it; empty where a value is required.
        unit: empty where the setting has none.
    """

    name: str
    type: str
    default: str
    unit: str
    description: str

    @property
    def summary(self) -> str:
        """Type, unit and default in one phrase."""
        unit = f", {self.unit}" if self.unit else ""
        return f"{self.type}{unit}, " + (f"default {self.default}" if self.default else "required")


@dataclass(frozen=True)
class SectionDescription:
    """A section of the tree and the settings that are directly in it."""

    name: str
    description: str
    settings: tuple[SettingDescription, ...]


def describe_sections() -> list[SectionDescription]:
    """Every section that holds settings, in the order of the tree."""
    return [section for section in _sections("", Settings, Settings()) if section.settings]


def describe_settings() -> list[SettingDescription]:
    """Every setting, in the order of the tree."""
    return [setting for section in describe_sections() for setting in section.settings]


def explain_setting(name: str) -> list[SettingDescription]:
    """The setting with a name, or all settings of a section, such as `trainer` or `reward.routes.world_facts`.

    A name of verl or Search-R1 is taken for ours where it means the same.

    Raises:
        SettingsError: there is none; the message names the new name, what replaces verl's, or the nearest.
    """
    known = describe_settings()
    found = [setting for setting in known if _matches(setting.name, name)]
    if not found:
        if name in RENAMED:
            raise SettingsError(f"setting '{name}' is now '{RENAMED[name]}': use the new name")
        if (theirs := find_counterpart(name)) is not None:
            if theirs.is_same:
                return explain_setting(theirs.ours)
            raise SettingsError(theirs.explain(name))
        near = difflib.get_close_matches(name, [setting.name for setting in known], n=1)
        hint = f"did you mean '{near[0]}'?" if near else "`forage config show` lists all"
        raise SettingsError(f"unknown setting '{name}': {hint}")
    exact = [setting for setting in found if setting.name.count(".") == name.count(".")]
    return exact or found


def _matches(pattern: str, name: str) -> bool:
    expected, given = pattern.split("."), name.split(".")
    return len(given) <= len(expected) and all(
        part in (key, "<name>", "<n>") for part, key in zip(expected, given, strict=False)
    )


def _sections(name: str, model: type[Section], defaults: Section | None) -> Iterator[SectionDescription]:
    """A section and those below it; `defaults` is None within a map or list, where the class alone has defaults."""
    settings, below = [], []
    for key, field in model.model_fields.items():
        path = f"{name}.{key}" if name else key
        default = getattr(defaults, key) if defaults else field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            below += list(_sections(path, type(default), default))
            continue
        settings.append(
            SettingDescription(
                name=path,
                type=_type_name(field.annotation, field.metadata),
                default=_as_yaml(default),
                unit=next((unit for end, unit in _UNITS.items() if key.endswith(end)), ""),
                description=field.description or "",
            )
        )
        for place, item in _item_sections(field.annotation):
            below += list(_sections(f"{path}.{place}", item, None))
    yield SectionDescription(name, " ".join((model.__doc__ or "").split()), tuple(settings))
    yield from below


def _item_sections(annotation: Any) -> Iterator[tuple[str, type[Section]]]:
    """The sections that a map or a list holds, and the placeholder of their key."""
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, Section):
            yield ("<name>" if get_origin(annotation) is dict else "<n>"), part
        else:
            for place, section in _item_sections(part):
                yield ("<name>" if get_origin(annotation) is dict else place), section


def _type_name(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    if named := next((label for label in metadata if isinstance(label, str)), ""):
        return named
    parts, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return _type_name(parts[0], parts[1:])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part, metadata) if part is not NoneType else "null" for part in parts)
    if origin is tuple:
        return f"list of {_type_name(parts[0])}"
    if origin is dict:
        return f"map of {_type_name(parts[1])}"
    if issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    if issubclass(annotation, Section):
        return "section"
    limits = [
        f"{sign} {getattr(limit, name)}" for limit in metadata for name, sign in _LIMITS.items() if hasattr(limit, name)
    ]
    return " ".join([_TYPES[annotation], ", ".join(limits)]).strip()


def _as_yaml(value: Any) -> str:
    if value is PydanticUndefined:
        return ""
    plain = to_jsonable_python(value, exclude_none=True)
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()
