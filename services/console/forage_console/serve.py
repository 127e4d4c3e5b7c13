"""The process: serves until SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import Iterator

import uvicorn
from upath import UPath

from forage_console.app import make_site
from forage_console.context import Console
from forage_console.security.access import WIRE, check_exposure
from forage_runtime.addresses import listen
from forage_runtime.errors import UserError
from forage_runtime.security.http.server import make_protocol
from forage_runtime.security.tls import check_server
from forage_runtime.settings import Settings
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger

DRAIN_S = 1
"""Streams of events have no end of their own."""
_KEEP_ALIVE_S = 30


def serve(settings: Settings) -> None:
    """Serve the runs of a folder until SIGTERM or SIGINT.

    Raises:
        SettingsError: the settings would let other machines in without a token.
        UserError: the port is in use, or no folder for temporary files is writable.
    """
    own = settings.console
    check_exposure(own)
    check_server(settings.tls, "console")
    check_temporary_folder()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the guard logs what fails, with its request
    runs, health = UPath(settings.runs_address), Health()
    config = uvicorn.Config(
        make_site(Console(runs, settings), health),
        http=make_protocol(settings.tls, WIRE),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    listening = listen(own.http_address)
    health.mark_started()
    if not sys.stderr.isatty():  # a terminal has the sentence of `forage console`
        get_logger().info("serving", http=own.http_address, runs=str(runs))
    _Server(config).run([listening])


def check_temporary_folder() -> None:
    """Check that there is a folder for temporary files, which queries need.

    Raises:
        UserError: there is none.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            f"{error.strerror}: make /tmp writable ('docker run --tmpfs /tmp'), or name a writable folder in TMPDIR"
        ) from error


class _Server(uvicorn.Server):  # type: ignore[misc]
    """Ends as the other services do: with exit code 0 on SIGTERM and on SIGINT."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield
