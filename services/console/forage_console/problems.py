"""Errors as `{"detail": sentence}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from forage_console.errors import NotFoundError
from forage_console.models.base import Problem
from forage_runtime.clients.calls import RefusedError
from forage_runtime.errors import ForageError, UnavailableError

_SHOWN = 80
_LONGEST = 600
_STATUSES: Mapping[type[ForageError], int] = {
    NotFoundError: 404,
    UnavailableError: 503,
    RefusedError: 409,
    ForageError: 422,
}
"""Error → status; the first that fits counts."""


def add_problems(app: FastAPI) -> None:
    """Let an application answer errors in this form."""
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ForageError, _answer_typed)
    app.add_exception_handler(Exception, _answer_failure)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _reply("; ".join(dict.fromkeys(_describe(one) for one in error.errors()[:3])), 422)


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404 and detail == "Not Found":
        detail = "there is no such page"
    if error.status_code == 400:  # FastAPI's, of a body that is no text
        return _reply("the body is not JSON: it is not UTF-8", 422)
    return _reply(detail, error.status_code, error.headers)


def _describe(error: Mapping[str, Any]) -> str:
    """Name the field, what is wrong with it, and its value."""
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
    field = ".".join(map(str, error["loc"][1:])) or "the body"
    value = "" if error["type"] == "missing" else f", not {_shorten(error.get('input'))}"
    return f"{field}: {error['msg'][:1].lower()}{error['msg'][1:]}{value}"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


async def _answer_typed(request: Request, error: Exception) -> JSONResponse:
    return _reply(
        _shorten_lines(str(error)), next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
    )


def _shorten_lines(text: str) -> str:
    """One line: errors of gRPC have several."""
    return " ".join(text.split())[:_LONGEST]


async def _answer_failure(request: Request, error: Exception) -> JSONResponse:
    return _reply("the console failed to answer: its log says why", 500)


def _reply(detail: str, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(Problem(detail=detail).model_dump(), status, headers)
