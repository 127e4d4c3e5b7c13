"""Reads what people train with in verl: a shell script with `main_ppo key=value …`, or a YAML file. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from forage_runtime.errors import DataError
from forage_runtime.settings.loading import parse_yaml
from forage_runtime.verl_keys import list_leaves

_COMMENT_LINE = re.compile(r"^[ \t]*#.*\n?", re.MULTILINE)
_TRAINING = re.compile(r"(?:[^\s=]*[./])?main(?!_generation|_eval)(?:_\w+)?(?:\.py)?")
"""The word that names a program which trains: verl.trainer.main_ppo, recipe/dapo/main_dapo.py."""
_KEY = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*=\(")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|(\w+))")
_UNRESOLVED = re.compile(r"\$[\w{(]|`")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}")
_MOST_REFERENCES = 10


def read_verl_file(file: Path) -> dict[str, Any]:
    """Key → value, as the file gives them; references to other keys and variables of the script are resolved.

    Raises:
        DataError: it cannot be read, or names no key.
    """
    try:
        text = file.read_text(encoding="utf-8")
        values = _read_yaml(file, text) if file.suffix in (".yaml", ".yml") else _read_script(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise DataError(f"{file} cannot be read ({reason}): give a shell script or a YAML file of verl") from None
    if not values:
        raise DataError(
            f"{file} names no setting: expected a script with 'python3 -m verl.trainer.main_ppo key=value …', or a "
            "YAML file (.yaml)"
        )
    return {key: _resolve(value, values) for key, value in values.items()}


def is_unresolved(value: Any) -> bool:
    """Whether a value refers to a variable, a key or a command whose result the file does not say."""
    if isinstance(value, list):
        return any(map(is_unresolved, value))
    return isinstance(value, str) and _UNRESOLVED.search(value) is not None


def _read_yaml(file: Path, text: str) -> dict[str, Any]:
    tree = parse_yaml(text)
    if not isinstance(tree, dict):
        raise DataError(f"{file} must hold a mapping of sections, not a {type(tree).__name__}")
    leaves = ((".".join(map(str, path)), value) for path, value in list_leaves(tree))
    return {key: value for key, value in leaves if not key.startswith(("hydra.", "defaults"))}


def _read_script(text: str) -> dict[str, Any]:
    """The last value of each key of the last command that trains, or of all commands where none is known to."""
    variables: dict[str, str] = {}
    others: dict[str, Any] = {}
    training: dict[str, Any] = {}
    for words in _list_commands(text):
        named = words[1:] if words[:1] in (["export"], ["local"], ["declare"]) else words
        assignments = [_ASSIGNMENT.fullmatch(word) for word in named]
        if all(assignments):
            variables |= {found[1]: _expand(found[2], variables) for found in assignments if found}
            continue
        line = list(_expand_words(words, variables))
        start = next((place for place, word in enumerate(line) if _TRAINING.fullmatch(word)), None)
        if start is not None:
            training = _read_arguments(line[start:])
        else:
            others |= _read_arguments(line)
    return training or others


def _list_commands(text: str) -> Iterator[list[str]]:
    """The words of each line, continued ones joined; an array, `NAME=(word …)`, is one word `NAME=word …`.

    Raises:
        ValueError: a quotation has no end.
    """
    held = ""
    array: list[str] = []
    for line in _COMMENT_LINE.sub("", text).replace("\\\n", " ").splitlines():
        held += f"{line}\n"
        try:
            words = shlex.split(held, comments=True)
        except ValueError:  # the quotation ends on a later line
            continue
        held = ""
        if array or (words and _ARRAY.match(words[0])):
            array += words
            if not array[-1].endswith(")"):
                continue
            words, array = [_join_array(array)], []
        if words:
            yield words
    if held.strip():
        raise ValueError(f"a quotation has no end: {held.strip()[:80]!r}")


def _join_array(words: Sequence[str]) -> str:
    name, _, first = words[0].partition("=(")
    inner = [first, *words[1:]]
    inner[-1] = inner[-1].removesuffix(")")
    return f"{name}={shlex.join(word for word in inner if word)}"


def _expand_words(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """Words with the variables of the script; one that is a variable alone can stand for several."""
    for word in words:
        text = _expand(word, variables)
        yield from [text] if text == word or "=" in word else shlex.split(text)


def _read_arguments(words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        found = _KEY.fullmatch(word)
        if found and ("." in found[1] or found[1] in ("max_turns", "do_search")):
            values[found[1]] = found[2] if is_unresolved(found[2]) else _parse(found[2])
    return values


def _parse(text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """A word with the variables of the script; one that it does not set stays as it is written."""
    return _VARIABLE.sub(
        lambda found: variables.get(found[1] or found[3], found[0] if found[2] is None else found[2]), word
    )


def _resolve(value: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """The value that `${a.key}` or `${oc.select:a.key,default}` stands for; where the file does not say, the text."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if found is None or depth > _MOST_REFERENCES:
        return value
    if found[1] in values:
        return _resolve(values[found[1]], values, depth + 1)
    return value if found[2] is None else _parse(found[2])
