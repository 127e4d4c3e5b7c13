"""Start and end of every command; apart from `service`, whose imports would slow down `forage --help`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from forage_runtime.errors import ForageError
from forage_runtime.text.redaction import redact_text
from forage_runtime.text.terminal import escape_unencodable, printable

USER_ERROR = 2
_LONGEST = 2000
"""Characters of a line of an error."""


def run_command(app: Callable[..., None], name: str) -> None:
    """Run a typer application as `name` and exit: a typed error is one sentence, with code 2 if it is a UserError.

    So is what the machine says about a file, an argument or a variable that no code of ours looked at first.
    """
    escape_unencodable()
    try:
        _check_arguments(sys.argv[1:])
        app(prog_name=name)
    except ForageError as error:
        _end(str(error), error.exit_code)
    except BrokenPipeError:  # whoever read the output has enough, as `head` does
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _end(f"{place}{error.strerror or error}: check that path, its rights and the space on its disk", USER_ERROR)


def _check_arguments(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            _end(f"the argument {argument!r} is not UTF-8 text: write it so, or set PYTHONUTF8=1", USER_ERROR)
        if "\0" in argument:
            _end(f"the argument {argument!r} holds a NUL, which no name or value may", USER_ERROR)


def _end(sentence: str, code: int) -> None:
    from forage_runtime.text.console import TextConsole

    console = TextConsole(stderr=True, soft_wrap=True, highlight=False)
    for line in printable(redact_text(sentence)).splitlines():  # one of several problems
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
        console.print(f"forage: {line}", style="red")
    sys.exit(code)
