"""Settings from a YAML file, the environment and the command line."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from forage_runtime.errors import SettingsError
from forage_runtime.settings.tree import Settings
from forage_runtime.text.redaction import redact_text

_MOST_VALUES, _MOST_DEPTH = 100_000, 100

ENV_PREFIX = "FORAGE__"

RENAMED = {
    "rollout.attach": "rollout.use_existing_app",
    "rollout.engine.block_size": "rollout.engine.args.block_size",
    "rollout.engine.enforce_eager": "rollout.engine.args.enforce_eager",
    "trainer.algorithm.probe_penalty.timeout_s": "trainer.probe.timeout_s",
    "trainer.engine.reshard_after_forward": "trainer.engine.args.reshard_after_forward",
}
"""Old name → new name, both from the root of the tree. An old name is an error that names the new one."""

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""What no path, name or message can hold."""

_shortener = reprlib.Repr()
"""For values in errors: a few lines of YAML can name one list so often that it would fill the memory."""
_shortener.maxlevel = 2
_shortener.maxstring = _shortener.maxother = 200


def load_settings(
    file: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Settings:
    """Load settings from a YAML file, the environment and `a.b=c` overrides; later sources take precedence.

    Raises:
        SettingsError: a key is unknown, renamed, or has an invalid value; the message names key, value and remedy.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        tree = _read_file(file)
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            _set_value(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), _parse_value(value), name)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            given = re.split(r"(?<=[:\s])", override, maxsplit=1)[0]  # what follows may be a password
            raise SettingsError(f"'{given}' is not a setting: write key.key=value, for instance run.seed=1")
        _set_value(tree, key.split("."), _parse_value(value), key)
    return check_settings(tree)


def check_settings(tree: Mapping[str, Any]) -> Settings:
    """The settings of a tree of values.

    Raises:
        SettingsError: as `load_settings`.
    """
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_describe_error(error)) from None


def settings_from_arguments(arguments: Sequence[str]) -> Settings:
    """Load the settings of a service process from its arguments: `[--config FILE | -c FILE] [key.key=value …]`."""
    rest = list(arguments)
    file = None
    if rest[:1] in (["--config"], ["-c"]):
        if len(rest) < 2:
            raise SettingsError(f"{rest[0]} needs a file: write {rest[0]} configs/demo.yaml")
        file = Path(rest[1])
        rest = rest[2:]
    return load_settings(file, rest)


def _read_file(file: Path) -> dict[str, Any]:
    try:
        tree = _parse_yaml(file.read_bytes()) or {}
    except OSError as error:
        raise SettingsError(
            f"settings file {file} cannot be read ({error.strerror}): give an existing YAML file"
        ) from None
    except yaml.YAMLError as error:
        # Without its quotation of the line, which may hold a password.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise SettingsError(f"settings file {file} is not YAML{place}: {' '.join(problem.split())}") from None
    if not isinstance(tree, dict):
        raise SettingsError(f"settings file {file} must hold a mapping of sections, not a {type(tree).__name__}")
    return tree


def _parse_value(text: str) -> Any:
    try:
        return _parse_yaml(text)
    except yaml.YAMLError:
        return text


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML forbids it, and the value that came first would silently be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if len(set(keys)) < len(keys):
            twice = next(key for place, key in enumerate(keys) if key in keys[:place])
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[:80]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _check_size(value: Any, left: list[int], depth: int = 0) -> None:
    """Raise where aliases make a small file a large tree; one that contains itself has no end."""
    left[0] -= 1
    if left[0] < 0 or depth > _MOST_DEPTH:
        raise yaml.YAMLError(f"it has more than {_MOST_VALUES} values, or {_MOST_DEPTH} levels")
    if isinstance(value, int) and abs(value) >= 2**64:
        raise yaml.YAMLError("a number has more than 64 bits")
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise yaml.YAMLError(f"{_shortener.repr(value)} holds a NUL or half of a surrogate pair")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_size(part, left, depth + 1)


def _parse_yaml(content: str | bytes) -> Any:
    try:
        value = yaml.load(content, _Loader)
        _check_size(value, [_MOST_VALUES])
        return value
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError) as error:  # what PyYAML lets pass
        raise yaml.YAMLError(f"a date, number or tag that there is not ({error})") from None


def _set_value(tree: dict[str, Any], path: list[str], value: Any, source: str) -> None:
    node = tree
    for key in path[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{source}: '{key}' is a value, not a section")
        node = child
    node[path[-1]] = value


def _describe_error(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        if name in RENAMED:
            return f"setting '{name}' is now '{RENAMED[name]}': use the new name{more}"
        known = _list_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"
        return f"unknown setting '{name}': {hint}{more}"
    sentence = first["msg"].removeprefix("Value error, ")
    if isinstance(first["input"], Mapping):  # a rule between settings, whose sentence names them
        return f"{f'setting {name!r}: ' if name else ''}{sentence}{more}"
    value = first["input"]
    if isinstance(value, str) and ("@" in value or ("://" in value and first["type"] == "value_error")):
        return f"setting '{name}' may hold a password, and is not shown: {sentence}{more}"
    return f"setting '{name}' is {redact_text(_show(value))}: {sentence}{more}"


def _show(value: Any) -> str:
    try:
        return _shortener.repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number of thousands of digits"


def _list_keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Settings
    for key in path:
        field = model.model_fields.get(key)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return sorted(model.model_fields)
