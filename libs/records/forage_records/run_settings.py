"""The settings of a run: as its folder has them, and where they differ from the defaults or from another run's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from forage_runtime.settings import Settings
from forage_runtime.text.redaction import redact_settings

_MOST_BYTES = 1024 * 1024
_MOST_VALUES = 20_000
_UNREADABLE = "settings.yaml cannot be read"


@dataclass(frozen=True)
class RunSettings:
    """What a settings.yaml says. It may be of another version of Forage, so nothing in it is taken for granted.

    Attributes:
        tree: as it stands, without passwords in addresses.
        flat: dotted name → value.
        problem: why it cannot be read.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    flat: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def model(self) -> str | None:
        path = self.read_text("model.path")
        return PurePosixPath(path).name if path else None

    @property
    def algorithm(self) -> str | None:
        return self.read_text("trainer.algorithm.adv_estimator")

    def read_text(self, name: str) -> str | None:
        value = self.flat.get(name)
        return value if isinstance(value, str) else None

    def read_number(self, name: str) -> float | None:
        value = self.flat.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def list_changed(self) -> list[str]:
        """List the settings that differ from the defaults; the run's name always does, and is left out."""
        defaults = _read_defaults()
        return [name for name, value in self.flat.items() if name != "run.id" and value != defaults.get(name, _Missing)]

    def compare(self, other: RunSettings) -> list[tuple[str, Any, Any]]:
        """List (name, own value, the other's value) of settings that differ; None where one has none."""
        names = dict.fromkeys([*self.flat, *other.flat])
        pairs = ((name, self.flat.get(name), other.flat.get(name)) for name in names if name != "run.id")
        return [pair for pair in pairs if pair[1] != pair[2]]


class _Missing:
    """The default of a setting that this version does not have."""


def read_settings(file: Path) -> RunSettings:
    """Read the settings of a run; never an error."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            return RunSettings(problem=f"{_UNREADABLE}: it is larger than 1 MiB")
        tree = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if not isinstance(tree, dict):
            return RunSettings(problem=f"{_UNREADABLE}: it holds no settings")
        budget = [_MOST_VALUES]
        clean = redact_settings(_clean(tree, budget))
        return RunSettings(clean, dict(_flatten(clean)))
    except FileNotFoundError:
        return RunSettings()  # `forage up` writes it; a trainer that was started by itself, as in a container, does not
    except OSError as error:
        return RunSettings(problem=f"{_UNREADABLE}: {error.strerror or error}")
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # `!!bool x`, `!!int ""`
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" (line {line + 1})" if line is not None else ""
        return RunSettings(problem=f"{_UNREADABLE}: it is not valid YAML{where}")


@cache
def _read_defaults() -> dict[str, Any]:
    return dict(_flatten(_clean(Settings().model_dump(mode="json"), [_MOST_VALUES])))


def _clean(value: Any, budget: list[int]) -> Any:
    """Return a value as JSON has it; a file that names one part many times must not grow without end."""
    budget[0] -= 1
    if budget[0] < 0:
        raise ValueError("too many values")
    if isinstance(value, dict):
        return {str(name): _clean(part, budget) for name, part in value.items()}
    if isinstance(value, list):
        return [_clean(part, budget) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
