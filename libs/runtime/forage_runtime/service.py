"""Start and end of every service process: settings from the command line, logs, tracing, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from forage_runtime.errors import StartError, UserError
from forage_runtime.security.profile import check_profile
from forage_runtime.settings import Settings, settings_from_arguments
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.logs import SERVICE_FAILED, configure_logs, get_logger
from forage_runtime.telemetry.stacks import write_stacks_on_signal
from forage_runtime.text.redaction import redact_text
from forage_runtime.text.terminal import echo, escape_unencodable

_SETTINGS_HELP = """\
Settings come from FILE, then from the environment (FORAGE__RUN__SEED=1), then from the command line (run.seed=1).
'forage config explain' and docs/reference/settings.md describe them all."""


def run_service(name: str, main: Callable[[Settings], None]) -> None:
    """Run a service's `main` and exit: 0 when it returns, 1 on an error.

    On a UserError or a StartError with one sentence and the error's own code.

    With --help print the docstring of the program instead.
    """
    escape_unencodable()
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(f"{(sys.modules['__main__'].__doc__ or '').strip()}\n\n{_SETTINGS_HELP}")
        sys.exit(0)
    configure_logs(name)
    write_stacks_on_signal()
    log = get_logger()
    try:
        settings = settings_from_arguments(sys.argv[1:])
        check_profile(settings, name)
        tracing.start(settings, name)
        main(settings)
    except (UserError, StartError) as error:
        echo(f"forage {name}: {redact_text(str(error))}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        log.exception(SERVICE_FAILED, reason=" ".join(f"{type(error).__name__}: {error}".split()))
        sys.exit(1)
    finally:
        tracing.stop()
