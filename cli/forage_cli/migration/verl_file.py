"""Reads what people train with in verl: a shell script with `main_ppo key=value …`, or a YAML file. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from forage_runtime.errors import DataError
from forage_runtime.settings.loading import parse_yaml
from forage_runtime.verl_keys import list_leaves

_COMMENT_LINE = re.compile(r"[ \t]*#")
_COMMENT_AT_END = re.compile(r"[ \t]#[^'\"\n]*$", re.MULTILINE)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1(?![^\s;&|<>)])")
"""Not a shift of bits, `$((1 << 20))`."""
_FILE_OF_KEYS = re.compile(r"--config-(?:name|path|dir)\b")
_TRAINING = re.compile(r"(?:[^\s=]*[./])?main(?!_generation|_eval)(?:_\w+)?(?:\.py)?")
"""The word that names a program which trains: verl.trainer.main_ppo, recipe/dapo/main_dapo.py."""
_KEY = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*=\(")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|(\w+))")
_UNRESOLVED = re.compile(r"\$[\w{(]|`")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}")
_MOST_REFERENCES = 10


class VerlFile(NamedTuple):
    """What a file says.

    values: key → value; references to other keys and variables of the script are resolved. unread: for each line of a
    script that may say more, why it is not read.
    """

    values: dict[str, Any]
    unread: list[str]


class Command(NamedTuple):
    """A command of a script: where it begins, its words, and the lines of its here-document."""

    line: int
    words: list[str]
    body: list[tuple[int, str]]


def read_verl_file(file: Path) -> VerlFile:
    """Read what a script or a YAML file says.

    Raises:
        DataError: it cannot be read, or names no key.
    """
    try:
        text = file.read_text(encoding="utf-8")
        unread: list[str] = []
        values = _read_yaml(file, text) if file.suffix in (".yaml", ".yml") else _read_script(text, unread)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise DataError(f"{file} cannot be read ({reason}): give a shell script or a YAML file of verl") from None
    if not values:
        raise DataError(
            f"{file} names no setting: expected a script with 'python3 -m verl.trainer.main_ppo key=value …', or a "
            "YAML file (.yaml)"
        )
    return VerlFile({key: _resolve(value, values) for key, value in values.items()}, unread)


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


def _read_script(text: str, unread: list[str]) -> dict[str, Any]:
    """The last value of each key of the last command that trains, or of all commands where none is known to.

    Args:
        unread: is extended by what may say more.
    """
    variables: dict[str, str] = {}
    others: dict[str, Any] = {}
    training: dict[str, Any] = {}
    for line, words, _ in _list_all_commands(enumerate(text.splitlines(), 1), unread):
        named = words[1:] if words[:1] in (["export"], ["local"], ["declare"]) else words
        assignments = [_ASSIGNMENT.fullmatch(word) for word in named]
        if all(assignments):
            variables |= {found[1]: _expand(found[2], variables) for found in assignments if found}
            continue
        expanded = list(_expand_words(words, variables))
        start = next((place for place, word in enumerate(expanded) if _TRAINING.fullmatch(word)), None)
        if start is not None:
            training = _read_arguments(expanded[start:])
            files = [word for word in expanded[start:] if _FILE_OF_KEYS.match(word)]
            unread += [f"line {line}: {word} names a file of keys: translate that file, too" for word in files]
        elif words[0] in ("source", "."):
            unread.append(f"line {line}: {' '.join(words[:2])} may set variables")
        else:
            others |= _read_arguments(expanded)
    return training or others


def _list_all_commands(lines: Iterable[tuple[int, str]], unread: list[str]) -> Iterator[Command]:
    """The commands of a script, and those of a here-document that trains; others are files or programs."""
    for command in _list_commands(lines):
        yield command
        if any(_TRAINING.fullmatch(word) for _, line in command.body for word in line.split()):
            yield from _list_all_commands(command.body, unread)
        elif command.body:
            unread.append(f"line {command.line}: the here-document of '{command.words[0]}' is no command that trains")


def _list_commands(lines: Iterable[tuple[int, str]]) -> Iterator[Command]:
    """Each command, continued lines joined; an array, `NAME=(word …)`, is one word `NAME=word …`.

    Raises:
        ValueError: a quotation, or a here-document, has no end.
    """
    held, begin = "", 0
    array: list[str] = []
    left = iter(lines)
    for number, line in left:
        if _COMMENT_LINE.match(line):  # also between continued lines
            continue
        begin = begin if held else number
        if line.endswith("\\"):
            held += f"{line[:-1]} "
            continue
        held += f"{line}\n"
        try:
            words = shlex.split(held, comments=True)
        except ValueError:  # the quotation ends on a later line
            continue
        ends = [found[2] for found in _HERE_DOCUMENT.finditer(_COMMENT_AT_END.sub("", held))]
        body = [each for end in ends for each in _read_here_document(left, end)]
        held = ""
        if array or (words and _ARRAY.match(words[0])):
            array += words
            if not array[-1].endswith(")"):
                continue
            words, array = [_join_array(array)], []
        if words:
            yield Command(begin, words, body)
    if held.strip():
        raise ValueError(f"a quotation has no end: {held.strip()[:80]!r}")


def _read_here_document(left: Iterator[tuple[int, str]], end: str) -> Iterator[tuple[int, str]]:
    for number, line in left:
        if line.strip() == end:
            return
        yield number, line
    raise ValueError(f"a here-document has no end: {end}")


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
