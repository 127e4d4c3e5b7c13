"""The HTTP application: the interface of the front end below /api, its built files, health and metrics."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.types import ASGIApp

from forage_console.api import comparison, questions, runs, services, trajectories
from forage_console.context import Console
from forage_console.models.base import Problem
from forage_console.pages import add_pages
from forage_console.probes import make_probes
from forage_console.problems import add_problems
from forage_console.security.access import Access
from forage_console.security.guard import Guard
from forage_console.security.login import make_login
from forage_runtime import __version__
from forage_runtime.telemetry.health import Health

_COMPRESSION = 4
"""Of gzip's nine levels: a page of a step takes a quarter of the time of the highest, and 5 % more bytes."""
_UNCOMPRESSED = ("application/vnd.apache.parquet", "application/octet-stream", "application/gzip")


def make_app(console: Console) -> FastAPI:
    """Build the interface of the front end, which `make reference` and its types are generated from."""
    app = FastAPI(
        title="Forage console",
        version=__version__,
        description=__doc__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        generate_unique_id_function=lambda route: route.name,
        responses={code: {"model": Problem} for code in (404, 409, 422, 503)},
    )
    app.state.console = console
    add_problems(app)
    for routes in (runs, comparison, trajectories, questions, services):
        app.include_router(routes.router, prefix="/api")
    return app


def make_site(console: Console, health: Health) -> ASGIApp:
    """Build all that is served: the interface, the pages, health and metrics, behind the guard.

    Raises:
        SettingsError: the token's file cannot be read.
    """
    app = make_app(console)
    access = Access(console.settings.console.auth_token_file)
    for router in (make_probes(health, console.settings.runs_digest), make_login(access)):
        app.include_router(router)
    add_pages(app)
    excluded = (*DEFAULT_EXCLUDED_CONTENT_TYPES, *_UNCOMPRESSED)
    compressed = GZipMiddleware(app, 1000, _COMPRESSION, exclude_content_types=excluded)
    return Guard(compressed, console.settings, access)
