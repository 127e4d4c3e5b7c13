"""Start-up checks: every problem of settings and files at once, a line each.

A service lists its own in `forage_<service>.checks`, makes them before it starts, and is asked for them alone by
`forage config check`, as `python -m forage_<service>.checks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from forage_runtime.errors import UserError
from forage_runtime.security.tls import Certificates, check_server
from forage_runtime.security.token_file import read_tokens
from forage_runtime.settings import Settings, settings_from_arguments
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.text.terminal import escape_unencodable

Check = Callable[[], object]
"""Raises a UserError whose sentence names setting, value and remedy."""
PROBLEM = "problem: "
REMARKS = ("warning: ", "note: ")
"""How lines of a service's answer begin; what libraries print besides is not read."""


def require_all(checks: Iterable[Check]) -> None:
    """Make every check.

    Raises:
        UserError: the one that fails, or the sentences of all that fail, one a line.
    """
    errors = list(_find_errors(checks))
    if len({str(error) for error in errors}) == 1:
        raise errors[0]
    if errors:
        raise UserError("\n".join(_list_sentences(errors)))


def find_problems(checks: Iterable[Check]) -> list[str]:
    """The sentences of the checks that fail, each once."""
    return _list_sentences(_find_errors(checks))


def name_setting(setting: str, check: Check) -> Check:
    """The check, whose sentence begins with the setting where it names another thing, such as a folder."""

    def make() -> None:
        try:
            check()
        except UserError as error:
            section = setting.partition(".")[0] + "."
            raise error if section in str(error).split(" ", 1)[0] else type(error)(f"{setting}: {error}") from None

    return make


def list_common_checks(settings: Settings, service: str, *callees: str) -> Iterator[Check]:
    """Checks of the files by which services trust each other.

    Args:
        service: its name in sentences; callees: sections whose token it accepts or sends.
    """
    yield partial(check_server, settings.tls, service)
    yield partial(Certificates, settings.tls)
    for name in callees:
        if (file := getattr(settings, name).auth_token_file) is not None:
            yield partial(read_tokens, file, f"{name}.auth_token_file")


def run_checks(
    list_checks: Callable[[Settings], Iterable[Check]],
    list_remarks: Callable[[Settings], Iterable[str]] = lambda _: (),
) -> None:
    """The program of a service's `checks` module: prints the problems, and what a user should know besides.

    Args:
        list_remarks: begin as `REMARKS`; a UserError of it is a problem, too.
    """
    escape_unencodable()
    configure_logs("check", "CRITICAL")
    settings = settings_from_arguments(sys.argv[1:])
    remarks: list[str] = []
    problems = find_problems([*list_checks(settings), lambda: remarks.extend(list_remarks(settings))])
    sys.stdout.writelines(f"{line}\n" for line in [*(PROBLEM + sentence for sentence in problems), *remarks])


def _find_errors(checks: Iterable[Check]) -> Iterator[UserError]:
    for check in checks:
        try:
            check()
        except UserError as error:
            yield error


def _list_sentences(errors: Iterable[UserError]) -> list[str]:
    return list(dict.fromkeys(line for error in errors for line in str(error).splitlines()))
