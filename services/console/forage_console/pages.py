"""The built files of the front end, and its page under every address that the front end has."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
ADDRESSES = ("/", "/compare", "/runs/{rest:path}")
"""Addresses of the front end's pages."""
_FOREVER = "public, max-age=31536000, immutable"


class _Assets(StaticFiles):  # type: ignore[misc]
    """Files whose names have a digest: another content has another name."""

    async def check_config(self) -> None:
        """Accept that the folder does not exist: it may be built later."""

    def file_response(self, *arguments: object, **named: object) -> Response:
        response: Response = super().file_response(*arguments, **named)
        response.headers["Cache-Control"] = _FOREVER
        return response


def add_pages(app: FastAPI, folder: Path = STATIC) -> None:
    """Add the routes of a built front end."""

    async def show_page() -> Response:
        if not (folder / INDEX).is_file():
            return JSONResponse({"detail": "the console's pages are not built: run 'make console'"}, 503)
        return FileResponse(folder / INDEX, headers={"Cache-Control": "no-cache"})

    for address in ADDRESSES:
        app.add_api_route(address, show_page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/assets", _Assets(directory=folder / "assets", check_dir=False))
    for file in sorted(folder.glob("*.*")):
        if file.is_file() and file.name != INDEX:
            app.add_api_route(f"/{file.name}", _make_file(file), methods=["GET", "HEAD"], include_in_schema=False)


def _make_file(file: Path) -> object:
    async def show_file() -> Response:
        return FileResponse(file)

    return show_file
