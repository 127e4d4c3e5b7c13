"""Generates docs/reference/cli.md from the commands' own help, each part in the environment that has the command.

.venvs/cli/bin/python scripts/cli_doc.py                writes the page
.venvs/<service>/bin/python scripts/cli_doc.py NAME     prints one part: forage, index, reward, trainer or worker
"""

from __future__ import annotations

import enum
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs/reference/cli.md"
PARTS = {
    "forage": ("cli", "forage_cli.main"),
    "index": ("retriever", "forage_retriever.command.main"),
    "reward": ("reward", "forage_reward.command.main"),
    "trainer": ("trainer", "forage_trainer.command"),
    "worker": ("rollout", "forage_rollout.command.main"),
    "model check": ("trainer", "forage_trainer.model_check.__main__"),
}
"""Part of the page → environment and module of its typer application."""
_INTRODUCTION = """# Command line

This page lists every command of `forage` with its arguments and options; `forage COMMAND --help` prints the same.
The program is `.venvs/cli/bin/forage` after `make setup`.

A command that takes `SETTINGS` accepts `key=value` for every key of the [settings](settings.md), for instance
`trainer.total_training_steps=50`. Exit codes: 0 = success, 1 = failure, 2 = wrong input or settings,
4 = a service cannot start, whatever is tried, 130 = Ctrl-C.

`make reference` generates this page.
"""
_TYPES = {"int": "INTEGER", "float": "FLOAT", "str": "TEXT", "Path": "PATH"}


def render_section(part: str) -> str:
    """Render the commands of one part; its module must be installed in this environment."""
    import typer

    command = typer.main.get_command(importlib.import_module(PARTS[part][1]).app)
    name = "forage" if part == "forage" else f"forage {part}"
    if not hasattr(command, "commands"):  # a single command
        return _entry(command, f"## `{name}`", name)
    return "\n".join(_commands(command, name, 2))


def _commands(command: Any, path: str, level: int) -> Iterator[str]:
    """Render a command, then its subcommands one heading level below; equal siblings share one entry."""
    children = getattr(command, "commands", {})
    if path.removeprefix("forage ") in PARTS and not children:
        return  # a forwarded command: the part of its service describes it
    yield _entry(command, f"{'#' * level} `{path}`", path)
    level += path != "forage"
    siblings: dict[str, list[str]] = {}
    for name, child in children.items():
        if f"{path} {name}".removeprefix("forage ") in PARTS and level > 2:
            continue  # as above
        if getattr(child, "commands", None):
            yield from _commands(child, f"{path} {name}", level)
        else:
            siblings.setdefault(_entry(child, "", f"{path} NAME"), []).append(name)
    for names in siblings.values():
        heading = f"{'#' * level} {', '.join(f'`{path} {name}`' for name in names)}"
        yield from (
            _commands(children[names[0]], f"{path} {names[0]}", level)
            if len(names) == 1
            else [_entry(children[names[0]], heading, f"{path} NAME")]
        )


def _entry(command: Any, heading: str, path: str) -> str:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    lines = [f"{heading}\n", f"{_text(command.help or '')}\n"]
    if not getattr(command, "commands", None):
        lines.append(f"```\n{_usage(path, shown)}\n```\n")
    if shown:
        lines.append("| argument or option | default | description |\n|---|---|---|")
        lines.append("\n".join(map(_row, shown)) + "\n")
    return "\n".join(lines)


def _usage(path: str, parameters: list[Any]) -> str:
    arguments = [_argument(p) for p in parameters if p.param_type_name == "argument"]
    options = ["[OPTIONS]"] if any(p.param_type_name == "option" for p in parameters) else []
    return " ".join([path, *options, *arguments])


def _argument(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_argument(parameter)}`"
    else:
        name = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            name += f" {_type(parameter)}"
    text = _text(parameter.help or "").replace("\n", " ")
    if parameter.multiple and "repeat" not in text:
        text += " Can be repeated."
    return f"| {name} | {_default(parameter)} | {text} |".replace("  |", " |")


def _type(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    while getattr(annotation, "__args__", None):
        annotation = annotation.__args__[0]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    return str(parameter.metavar or _TYPES.get(getattr(annotation, "__name__", ""), "TEXT"))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    default = parameter.default
    if default is None or default == "" or parameter.show_default is False or (default is False and parameter.is_flag):
        return ""
    return f"`{default.value if isinstance(default, enum.Enum) else default}`"


def _text(help: str) -> str:
    """Help text as Markdown: rich's bold becomes code, what Markdown would read as a table or a tag is escaped."""
    text = re.sub(r"\[bold\](.*?)\[/(?:bold)?\]", r"`\1`", help).replace("\\[", "[").replace("\f", "")
    text = re.sub(r"(?m)^  ?(forage .*)$", r"    \1", text)
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else part.replace("|", "\\|").replace("<", "&lt;") for part in parts
    ).strip()


def _write() -> None:
    parts = [_INTRODUCTION]
    for part, (environment, _) in PARTS.items():
        command = [str(REPOSITORY / f".venvs/{environment}/bin/python"), __file__, part]
        parts.append(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout)
    DOCUMENT.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write(render_section(sys.argv[1]))
    else:
        _write()
