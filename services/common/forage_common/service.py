"""Start and end of every service process: settings from the command line, logs, tracing, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from forage_common.errors import UserError
from forage_common.settings import Settings, settings_from_arguments
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import configure_logs, get_logger
from forage_common.telemetry.stacks import write_stacks_on_signal


def run_service(name: str, main: Callable[[Settings], None]) -> None:
    """Run a service's `main` and exit: 0 when it returns, 2 with one sentence on a UserError, 1 on any other error."""
    configure_logs(name)
    write_stacks_on_signal()
    log = get_logger()
    try:
        settings = settings_from_arguments(sys.argv[1:])
        tracing.start(settings, name)
        main(settings)
    except UserError as error:
        print(f"forage {name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        log.exception("service_failed")
        sys.exit(1)
    finally:
        tracing.stop()
