"""The stacks that this user has started and that run now; what is asked for against what they use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel

from forage_cli.local import serving
from forage_cli.local.family import list_services
from forage_cli.local.processes import find_supervisor
from forage_cli.local.stack import RECORD, STACKS, Program, shift_ports
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import Settings, load_settings
from forage_runtime.telemetry.stacks import FOLDER_VARIABLE
from forage_runtime.text.console import TextConsole

SETTINGS = "settings.yaml"
_ADDRESSES = {Program.ROLLOUT: ("rollout", "grpc_address"), Program.REWARD: ("reward", "grpc_address")}
_USED = {
    Program.ROLLOUT: (("model",), ("rollout",), ("retriever",), ("reward",), ("data", "corpus"), ("run", "repeatable")),
    Program.REWARD: (("reward",),),
}
"""Service that a command calls → settings that the services answer by."""
_OWN = {"temperature", "top_p", "top_k", "max_groups_in_flight", "retrieve_timeout_s"}
_SHARES = {"engine_replicas", "gpu_memory_utilization"}
"""Settings of the section rollout: those that a request carries, or its caller goes by; and those that the division of
a machine's GPUs may change."""


@dataclass(frozen=True)
class RunningStack:
    """A stack that a command of this user runs.

    folder: of the run. settings: those of its services. home: where their relative paths begin.
    """

    folder: Path
    settings: Settings
    home: Path

    @property
    def is_here(self) -> bool:
        """Whether its folder is in runs/, or it was started in the working directory."""
        here = Path.cwd()
        return self.folder.parent == (here / "runs").resolve() or self.home == here

    @property
    def file(self) -> Path:
        return self.folder / SETTINGS


def names_address(overrides: Sequence[str]) -> bool:
    """Whether settings of a command line say where services are."""
    return any(setting.partition("=")[0].endswith("_address") for setting in overrides)


def list_running() -> list[RunningStack]:
    """List the stacks of this user that run on this machine."""
    found = []
    for folder in sorted(_list_folders()):
        supervisor = find_supervisor(folder / RECORD)
        with contextlib.suppress(psutil.Error, OSError, SettingsError):  # it ends, or is of another version
            if supervisor is None or supervisor.uids().real != os.getuid():
                continue
            found.append(RunningStack(folder, load_settings(folder / SETTINGS, (), {}), Path(supervisor.cwd())))
    return found


def _list_folders() -> set[Path]:
    """The folders of the runs whose services are processes of this user."""
    folders = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # processes end meanwhile, and some cannot be read
            if process.uids().real == os.getuid() and (stacks := process.environ().get(FOLDER_VARIABLE)):
                folders.add(Path(stacks.removesuffix(f"/{STACKS}")).resolve())
    return folders


def find_running(base_port: int | None = None, option: str = "-c") -> RunningStack | None:
    """Find the one stack with a rollout that runs here, or that with these ports; None: there is none.

    A rescore has none: it starts a reward service beside whatever runs.

    Args:
        option: the one of the command that names a stack, for the message: -c or --run.

    Raises:
        UserError: there are several; the message lists them.
    """
    wanted = dict(setting.split("=", 1) for setting in shift_ports(base_port)).get("rollout.grpc_address")
    stacks = [
        stack for stack in list_running() if stack.is_here and wanted in (None, stack.settings.rollout.grpc_address)
    ]
    stacks = [stack for stack in stacks if Program.ROLLOUT in list_services(stack.folder / RECORD)]
    if len(stacks) > 1:
        files = [stack.file if option == "-c" else stack.folder for stack in stacks]
        named = "\n".join(
            f"  {stack.settings.run.id}: {option} {_shorten(file)}" for stack, file in zip(stacks, files, strict=True)
        )
        raise UserError(f"{len(stacks)} runs have services here: say which one is meant\n{named}")
    return stacks[0] if stacks else None


def _shorten(file: Path) -> Path:
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def check_running(asked: Settings, overrides: Sequence[str], program: Program, has_file: bool) -> None:
    """Return if nobody listens where a command will call, or the services there use what is asked for.

    What services use that were not started here is unknown: a warning names the settings that are not sent to them.

    Args:
        overrides: settings of the command line.
        program: the service that the command calls.
        has_file: `asked` is of a file that was given; else nobody asked for more than `overrides` and the environment.

    Raises:
        UserError: the services use something else; the message names the setting.
    """
    if not serving.is_running(asked, program):
        return
    section, name = _ADDRESSES[program]
    address = getattr(getattr(asked, section), name)
    stacks = [stack for stack in list_running() if getattr(getattr(stack.settings, section), name) == address]
    stated = asked if has_file else load_settings(None, overrides)
    for stack in stacks:
        for path in _list_answered(stated, program):
            wanted, used, title = _read(asked, path), _read(stack.settings, path), ".".join(path)
            if not _is_same(wanted, used, stack.home):
                raise UserError(
                    f"the services of the run {stack.settings.run.id}, which run here, use {title}={_show(used)}, not "
                    f"{_show(wanted)}: leave it out, start other services with --base-port, or end these"
                )
    given = [".".join(path) for path in _list_answered(load_settings(None, overrides, {}), program)]
    if given and not stacks:
        text = f"the services at {address} answer by their own settings, whatever {', '.join(given)} is here"
        TextConsole(stderr=True).print(text, style="yellow", highlight=False, soft_wrap=True)


def _list_answered(settings: Settings, program: Program) -> list[tuple[str, ...]]:
    """The settings that were given, and that the services answer by."""
    return [path for path in _list_given(settings) if _is_answered_by(path, program)]


def _is_answered_by(path: tuple[str, ...], program: Program) -> bool:
    if path[-1].endswith("_address") or path[-1] == "auth_token_file":
        return False
    if path[0] == "rollout" and (path[1] in _OWN or _SHARES.intersection(path)):
        return False
    return any(path[: len(used)] == used for used in _USED[program])


def _list_given(section: BaseModel, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The settings that were given, not left at their defaults; each key of a map is one."""
    for name in section.model_fields_set:
        value, path = getattr(section, name), (*before, name)
        if isinstance(value, BaseModel):
            yield from _list_given(value, path)
        elif isinstance(value, Mapping):
            yield from ((*path, str(key)) for key in value)
        else:
            yield path


def _read(settings: Settings, path: tuple[str, ...]) -> Any:
    """The value of a setting; None where a map lacks the key."""
    value: Any = settings
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


def _is_same(one: Any, other: Any, home: Path) -> bool:
    """home: where the other's path begins."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == (home / other).resolve()
    return bool(one == other)


def _show(value: Any) -> str:
    """A value in a line; of a part of a route what differs from the defaults."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_show, value))}]" if len(value) != 1 else _show(value[0])
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        changed = {name: one for name, one in value if one != fields[name].get_default(call_default_factory=True)}
        return str(value.name) if [*changed] == ["name"] else str(changed)  # type: ignore[attr-defined]
    return "unset" if value is None else str(value)
