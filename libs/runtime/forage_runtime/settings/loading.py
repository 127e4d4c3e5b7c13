"""Settings from a YAML file, the environment and the command line."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forage_runtime.errors import SettingsError
from forage_runtime.settings.tree import Settings
from forage_runtime.text.redaction import redact_text
from forage_runtime.text.yaml_core import CoreLoader, TextLoader
from forage_runtime.verl_keys import find_counterpart, list_leaves

_MOST_VALUES, _MOST_DEPTH, _MOST_ERRORS = 100_000, 100, 20

ENV_PREFIX = "FORAGE__"

RENAMED = {
    "retriever.encoder.url": "retriever.encoder.model",
    "retriever.rerank.url": "retriever.rerank.model",
    "rollout.attach": "rollout.use_existing_app",
    "rollout.engine.block_size": "rollout.engine.args.block_size",
    "rollout.engine.enforce_eager": "rollout.engine.args.enforce_eager",
    "trainer.algorithm.probe_penalty.timeout_s": "trainer.probe.timeout_s",
    "trainer.engine.fsdp_size": "trainer.engine.args.fsdp_size",
    "trainer.engine.offload_policy": "trainer.engine.args.offload_policy",
    "trainer.engine.optimizer_offload": "trainer.engine.args.optimizer_offload",
    "trainer.engine.param_offload": "trainer.engine.args.param_offload",
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
        SettingsError: keys are unknown, renamed, or have invalid values; each has a line with key, value and remedy.
    """
    tree: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    if file is not None:
        tree, texts = _read_file(file)
        targets = {path: _find_path(path, value) for path, value in list_leaves(tree)}
        if any(path != target for path, target in targets.items()):
            tree, texts = _move(tree, targets), _move(texts, targets)
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            _set_both(tree, texts, _split_variable(name), value, name)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            given = re.split(r"(?<=[:\s])", override, maxsplit=1)[0]  # what follows may be a password
            raise SettingsError(f"'{given}' is not a setting: write key.key=value, for instance run.seed=1")
        _set_both(tree, texts, key.split("."), value, key)
    return check_settings(tree, texts)


def check_settings(tree: dict[str, Any], texts: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a tree of values.

    Args:
        texts: the same tree with the text of every scalar, which a setting that is a text takes: `run.id=0123`.

    Raises:
        SettingsError: as `load_settings`.
    """
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        if texts and _take_texts(tree, texts, error):
            return check_settings(tree)
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


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a file, and their texts."""
    try:
        content = file.read_bytes()
        tree = parse_yaml(content) or {}
        texts = parse_yaml(content, TextLoader) or {}
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
    return tree, texts


def _set_both(tree: dict[str, Any], texts: dict[str, Any], path: list[str], text: str, source: str) -> None:
    try:
        value, own = parse_yaml(text), parse_yaml(text, TextLoader)
    except yaml.YAMLError:
        value = own = text
    if target := _find_path(tuple(path), value):
        _set_value(tree, target, value, source)
        _set_value(texts, target, own, source)


def _split_variable(name: str) -> list[str]:
    """The path of a setting that a variable names.

    Settings are in lower case. The key of a map is as it is written; in capitals alone it is meant in lower case, too.
    """
    path: list[str] = []
    for part in name.removeprefix(ENV_PREFIX).split("__"):
        is_key = not _list_keys(path) and not part.isupper()
        path.append(part if is_key else part.lower())
    return path


def _find_path(path: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """Where a value goes: that of verl's key to our setting; nowhere if Forage always does what it asks for."""
    row = None if _is_setting(path) else find_counterpart(".".join(map(str, path)))
    if row is not None and row.is_fixed_at(value):
        return ()
    return tuple(row.ours.split(".")) if row is not None and row.is_same else path


def _is_setting(path: Sequence[str]) -> bool:
    """Whether a path may name a setting, or something within one."""
    return all(part in known for place, part in enumerate(path) if (known := _list_keys(path[:place])))


def _move(tree: dict[str, Any], targets: Mapping[tuple[str, ...], tuple[str, ...]]) -> dict[str, Any]:
    """A file's values where they go.

    Raises:
        SettingsError: one is given under both names.
    """
    moved: dict[str, Any] = {}
    for path, value in sorted(list_leaves(tree), key=lambda leaf: targets[leaf[0]] != leaf[0]):
        target, key = targets[path], ".".join(map(str, path))
        if target != path and target and target[-1] in (_descend(moved, target[:-1]) or ()):
            raise SettingsError(f"setting '{key}' is '{'.'.join(target)}' here, which is given as well: leave one out")
        if target:
            _set_value(moved, target, value, key)
    return moved


def _take_texts(tree: dict[str, Any], texts: Mapping[str, Any], error: ValidationError) -> bool:
    """Put the text in place of each scalar that was read as a number or a truth where a text belongs."""
    changed = False
    for one in error.errors():
        if one["type"] != "string_type" or not isinstance(one["input"], bool | int | float):
            continue
        *path, last = one["loc"]
        node, own = _descend(tree, path), _descend(texts, path)
        if node is not None and own is not None and isinstance(own[last], str):
            node[last] = own[last]
            changed = True
    return changed


def _descend(tree: Any, path: Sequence[int | str]) -> Any:
    """The part of a tree at a path; None where pydantic names a path that the tree does not have."""
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


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


def parse_yaml(content: str | bytes, loader: type[CoreLoader] = CoreLoader) -> Any:
    """
    Raises:
        yaml.YAMLError: it is no YAML, or larger than settings can be.
    """
    try:
        value = yaml.load(content, loader)
        _check_size(value, [_MOST_VALUES])
        return value
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError) as error:  # what PyYAML lets pass
        raise yaml.YAMLError(f"a date, number or tag that there is not ({error})") from None


def _set_value(tree: dict[str, Any], path: Sequence[str], value: Any, source: str) -> None:
    node = tree
    for key in path[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{source}: '{key}' is a value, not a section")
        node = child
    node[path[-1]] = value


def _describe_error(error: ValidationError) -> str:
    """Every error, a line each."""
    errors = error.errors()
    lines = dict.fromkeys(_describe_one(one) for one in errors[:_MOST_ERRORS])
    more = [f"and {len(errors) - _MOST_ERRORS} more"] if len(errors) > _MOST_ERRORS else []
    return "\n".join([*lines, *more])


def _describe_one(error: ErrorDetails) -> str:
    path = [str(part) for part in error["loc"]]
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        if name in RENAMED:
            return f"setting '{name}' is now '{RENAMED[name]}': use the new name"
        keys = (".".join(map(str, leaf)) for leaf, _ in list_leaves({name: error["input"]}))
        if theirs := [row.explain(key) for key in keys if (row := find_counterpart(key))]:
            return "\n".join(theirs)
        known = _list_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean '{'.'.join([*path[:-1], *near])}'?" if near else f"known here: {', '.join(known)}"
        return _join_lines(f"unknown setting '{name}': {hint}")
    sentence = error["msg"].removeprefix("Value error, ")
    if isinstance(error["input"], Mapping):  # a rule between settings, whose sentence names them
        return _join_lines(f"{f'setting {name!r}: ' if name else ''}{sentence}")
    value = error["input"]
    if isinstance(value, str) and ("@" in value or ("://" in value and error["type"] == "value_error")):
        return _join_lines(f"setting '{name}' may hold a password, and is not shown: {sentence}")
    return _join_lines(f"setting '{name}' is {redact_text(_show(value))}: {sentence}")


def _join_lines(text: str) -> str:
    return " ".join(text.split("\n"))


def _show(value: Any) -> str:
    try:
        return _shortener.repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number of thousands of digits"


def _list_keys(path: Sequence[str]) -> list[str]:
    kind: Any = Settings
    for key in path:
        kind = _find_kind(kind, key)
    sections = [one for one in _unwrap(kind) if isinstance(one, type) and issubclass(one, BaseModel)]
    return sorted(sections[0].model_fields) if sections else []


def _find_kind(kind: Any, key: str) -> Any:
    """Find the type of what is called `key` in a section, or is there in a map or a list; None where nothing is."""
    for one in _unwrap(kind):
        if isinstance(one, type) and issubclass(one, BaseModel):
            field = one.model_fields.get(key)
            return field and field.annotation
        if get_origin(one) in (dict, tuple):
            return next(part for part in reversed(get_args(one)) if part is not ...)
    return None


def _unwrap(kind: Any) -> Iterator[Any]:
    """Yield a type, or those of which one is meant by an `Annotated` or a union."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        yield from _unwrap(parts[0])
    elif parts and get_origin(kind) in (Union, UnionType):
        for part in parts:
            yield from _unwrap(part)
    else:
        yield kind
