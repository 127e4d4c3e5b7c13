"""Health and metrics, at the paths that every service has."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.waits import list_waits


def make_probes(health: Health, runs_digest: str) -> APIRouter:
    """Make the routes; `forage console` recognises by them a console of the same runs."""
    router = APIRouter(include_in_schema=False)
    identity = {"status": "ok", "service": "console", "runs": runs_digest}

    @router.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse(identity)

    @router.get("/readyz")
    async def readyz() -> Response:
        waiting = health.waiting
        body = {"ready": not waiting, "waiting_for": waiting, "notes": health.notes}
        return JSONResponse(body, 503 if waiting else 200)

    @router.get("/waitz")
    async def waitz() -> Response:
        return JSONResponse({"waits": list_waits()})

    @router.get("/metrics")
    def metrics(_: Request) -> Response:
        return Response(generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
