"""`forage logs`."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forage_cli.commands.runs.folders import Runs, complete_runs, find_runs_folder, is_active
from forage_runtime.errors import UserError
from forage_runtime.text.redaction import redact_text
from forage_runtime.text.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_POLL_S = 0.25
_COMMAND = "train"
"""Log of a command in the background, beside those of the services."""


def complete_services(incomplete: str) -> list[str]:
    """The names that a shell may complete."""
    return [name for name in list_services() if name.startswith(incomplete)]


def list_services() -> list[str]:
    """What has a log in the folder of a run."""
    from forage_cli.local.stack import Program

    return [*Program, _COMMAND]


def logs(
    service: Annotated[
        str,
        typer.Argument(
            help="redis, reward, retriever, rollout, trainer or console; train: the output of 'forage train --detach'."
            " Without it: all.",
            autocompletion=complete_services,
            show_default=False,
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what is written from now on, too, until the run ends.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 50,
    run: Annotated[
        str,
        typer.Option(
            "--run",
            help="Id or folder of a run. Without it: the one that wrote a log last.",
            autocompletion=complete_runs,
            show_default=False,
        ),
    ] = "",
    runs: Runs = None,
) -> None:
    """Print the logs of the services that 'forage train', 'forage demo' or 'forage up' started.

    With more than one service each line begins with its name.

    Examples:

      forage logs trainer -f

      forage logs --run first -n 200
    """
    from forage_cli.local.running import find_running

    known = list_services()
    if service and service not in known:
        raise UserError(f"there is no service '{service}': give one of {', '.join(known)}")
    stack = None if run or runs else find_running(option="--run")
    folder = stack.folder if stack else find_run_with_logs(find_runs_folder(runs), run)
    names = [service] if service else known
    if not follow and not any(log_of(folder, name).is_file() for name in names):
        written = [name for name in known if log_of(folder, name).is_file()]
        raise UserError(
            f"{folder} has no log of {service or 'a service'} yet:"
            f" {'there are those of ' + ', '.join(written) if written else 'its services have not started here'};"
            " -f waits for it"
        )
    readers = {name: LogReader(log_of(folder, name), lines) for name in names}
    try:
        for name, line in follow_logs(readers, folder) if follow else read_logs(readers):
            echo(redact_text(line if service else f"{name:<9} {line}"))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def find_run_with_logs(runs: Path, name: str) -> Path:
    """Find the folder of a run by its name, or that of the run that wrote a log last.

    Raises:
        DataError: there is no run of that name.
        UserError: no run has a log.
    """
    from forage_cli.runs.catalog import find_run

    if name:
        return find_run(runs, name).path
    # Not `latest`: `forage up` serves a run without making it that.
    written = sorted((file.stat().st_mtime, file.parent.parent) for file in runs.glob("*/logs/*.log"))
    if not written:
        raise UserError(
            f"no run in {runs} has a log: start one with 'forage train -c FILE', 'forage demo' or 'forage up'"
        )
    return written[-1][1].resolve()


def log_of(folder: Path, service: str) -> Path:
    """The file with the log of a service."""
    return folder / "logs" / f"{service}.log"


class LogReader:
    """Reads the last lines of a log, then those that are appended. A line without its end waits for it."""

    def __init__(self, file: Path, lines: int) -> None:
        self._file = file
        self._lines = lines
        self._offset = 0
        self._rest = b""
        self._is_first = True

    def read(self) -> Iterable[str]:
        """Read the lines that are new since the last call; none while there is no file."""
        try:
            with self._file.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:  # it was written anew
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                new = stream.read()
                self._offset = stream.tell()
        except FileNotFoundError:
            self._is_first = False  # every line of a log that begins later is new
            return []
        *whole, self._rest = (self._rest + new).split(b"\n")
        texts = [line.decode(errors="replace") for line in whole]
        if self._is_first:
            self._is_first = False
            return deque(texts, self._lines)
        return texts

    def read_rest(self) -> Iterable[str]:
        """Read the last line of a log that has no end."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def read_logs(readers: dict[str, LogReader]) -> Iterator[tuple[str, str]]:
    """Read what the logs hold: service and line."""
    for name, reader in readers.items():
        yield from ((name, line) for line in (*reader.read(), *reader.read_rest()))


def follow_logs(readers: dict[str, LogReader], folder: Path) -> Iterator[tuple[str, str]]:
    """Read what the logs hold and what is written to them, until no command runs the run's services."""
    goes_on = True
    while goes_on:
        goes_on = is_active(folder)  # first: what the services write before they end is read then
        for name, reader in readers.items():
            yield from ((name, line) for line in reader.read())
        if goes_on:
            time.sleep(_POLL_S)  # wait: until the run ends, or Ctrl-C
    for name, reader in readers.items():
        yield from ((name, line) for line in reader.read_rest())
