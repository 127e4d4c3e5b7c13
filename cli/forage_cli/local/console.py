"""The console beside a run, and alone: whether it can start, and whether one of the same runs is there already."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from forage_cli.local.home import find_home, find_interpreter
from forage_cli.local.processes import end_with_parent, interrupt_on_signals
from forage_cli.local.stack import Program
from forage_runtime.addresses import listen, reach_address
from forage_runtime.clients.health import list_health_urls, open_client
from forage_runtime.errors import UserError
from forage_runtime.security.tls import http_scheme
from forage_runtime.settings import ENV_PREFIX, Settings
from forage_runtime.text.redaction import redact_url

PAGE = Path("services/console/forage_console/static/index.html")
_POLL_S = 0.1
_STOP_S = 10.0


def find_url(settings: Settings) -> str:
    """The address for a browser on this machine."""
    return f"{http_scheme(settings.tls)}://{reach_address(settings.console.http_address)}"


def add_console(settings: Settings, programs: Sequence[Program], console: Console) -> tuple[Program, ...]:
    """Add the console to the programs of a run, if it can start; says where it is, or why there is none."""
    try:
        is_running = check_console(settings)
    except UserError as error:
        console.print(f"no console: {error}", style="yellow", highlight=False, soft_wrap=True)
        return tuple(programs)
    note = f"{' (it runs already)' if is_running else ''}{_say_sign_in(settings)}"
    console.print(Text.assemble("console  ", find_url(settings), note), soft_wrap=True)
    return tuple(programs) if is_running else (*programs, Program.CONSOLE)


def check_console(settings: Settings) -> bool:
    """Check that the console can start; returns whether one of the same runs is there already.

    Raises:
        UserError: it is not installed, not built, or another program has its port.
    """
    if is_running(settings):
        return True
    find_interpreter(Program.CONSOLE)
    if not (find_home() / PAGE).is_file():
        raise UserError("the console's pages are not built: run 'make console'")
    if _find_digest(settings) is not None:
        raise UserError(f"a console of other runs is at {find_url(settings)}: give this one another port")
    listen(settings.console.http_address).close()
    return False


def is_running(settings: Settings) -> bool:
    """Whether a console of the same runs answers at its address."""
    return _find_digest(settings) == settings.runs_digest


def _find_digest(settings: Settings) -> str | None:
    """What tells the runs of the console that answers; None without one."""
    url = list_health_urls(settings)[Program.CONSOLE].replace("/readyz", "/healthz")
    try:
        with open_client(settings.tls) as client:
            found = client.get(url).json()
    except (httpx.HTTPError, ValueError):
        return None
    return str(found["runs"]) if isinstance(found, dict) and found.get("service") == Program.CONSOLE else None


def serve_console(settings: Settings, console: Console, page: str) -> int:
    """Serve the console until Ctrl-C; returns the exit code.

    Args:
        page: path of the page to begin with.

    Raises:
        UserError: as `check_console`.
    """
    url = find_url(settings) + page
    if check_console(settings):
        console.print(Text.assemble("these runs are shown already: ", (url, "bold")))
        return 0
    command = [str(find_interpreter(Program.CONSOLE)), "-m", "forage_console", "--config", "/dev/stdin"]
    # The settings are resolved: variables of the shell must not override the command line again.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ |= {"OMP_NUM_THREADS": "1"}
    with (
        interrupt_on_signals(),
        subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environ, text=True, preexec_fn=end_with_parent, encoding="utf-8"
        ) as process,
    ):
        try:
            assert process.stdin is not None
            process.stdin.write(settings.to_yaml())
            process.stdin.close()
            while process.poll() is None and not is_running(settings):
                time.sleep(_POLL_S)  # wait: until it serves or ends
            if process.poll() is None:
                shows = f"  shows {redact_url(settings.runs_address)}{_say_sign_in(settings)}; Ctrl-C stops it"
                console.print(Text.assemble("console  ", (url, "bold"), shows))
            return process.wait()  # wait: the life of the console, which Ctrl-C ends
        except KeyboardInterrupt:
            process.terminate()
            code = process.wait(_STOP_S)  # wait: has a time limit
            # A terminal has sent it Ctrl-C as well: of two signals it takes the second as its end.
            return 0 if code in (-signal.SIGINT, -signal.SIGTERM) else code


def _say_sign_in(settings: Settings) -> str:
    token = settings.console.auth_token_file
    return "" if token is None else f"; sign in with the token of {token}"
