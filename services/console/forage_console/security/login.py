"""The page that asks for the token; it needs no script."""

from __future__ import annotations

from html import escape
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from forage_console.security.access import SESSION_S, Access, TooManyTriesError
from forage_console.security.guard import COOKIE, LOGIN
from forage_runtime.security.http.guard import find_peer

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Sign in · Forage</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 15vh auto; max-width: 22rem; padding: 0 1rem }
h1 { font-size: 1.25rem }
input, button { box-sizing: border-box; font: inherit; margin: .5rem 0; padding: .5rem; width: 100% }
</style>
</head>
<body>
<main>
<h1>Forage console</h1>
<form method="post" action="ACTION">
<label for="token">The token of this console (the file of console.auth_token_file)</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Sign in</button>
</form>
<p role="alert">MESSAGE</p>
</main>
</body>
</html>
"""


def make_login(access: Access) -> APIRouter:
    """Make the routes of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get(LOGIN)
    def show_form(request: Request) -> Response:
        after = _find_next(request)
        return RedirectResponse(after, 303) if access.is_open else _render(after)

    @router.post(LOGIN)
    async def sign_in(request: Request) -> Response:
        after = _find_next(request)
        if access.is_open:
            return RedirectResponse(after, 303)
        form = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=10)
        token = form.get("token", [""])[0].strip()
        try:
            is_right = access.admits_token(token, find_peer(request.scope))
        except TooManyTriesError as error:
            return _render(after, f"{error}.", 429, {"Retry-After": f"{error.wait_s:.0f}"})
        if not is_right:
            return _render(after, "This is not the token.", 401)
        response = RedirectResponse(after, 303)
        response.set_cookie(
            COOKIE,
            access.make_session(token),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure="https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0]),
        )
        return response

    @router.post("/logout")
    def sign_out() -> Response:
        response = RedirectResponse(LOGIN, 303)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    return router


def _find_next(request: Request) -> str:
    """The page to go to; never one of another site."""
    wanted = request.query_params.get("next", "/")
    is_own = wanted.startswith("/") and not wanted.startswith(("//", "/\\")) and wanted.isprintable()
    return wanted if is_own else "/"


def _render(after: str, message: str = "", status: int = 200, headers: dict[str, str] | None = None) -> Response:
    action = escape(f"{LOGIN}?next={quote(after, safe='')}")
    return HTMLResponse(_PAGE.replace("ACTION", action).replace("MESSAGE", escape(message)), status, headers)
