"""The process: both servers listen at once, the index is loaded on a thread, SIGTERM drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import uvicorn

from forage_retriever.checks import list_checks
from forage_retriever.serve.batcher import SEARCH_THREAD
from forage_retriever.serve.grpc_api import GrpcServer
from forage_retriever.serve.http_api import WIRE, make_app
from forage_retriever.serve.retrieval import ANSWER_LIMIT_S, Retrieval
from forage_retriever.serve.swap import INDEX_THREAD, IndexSwap
from forage_runtime.addresses import listen
from forage_runtime.problems import require_all
from forage_runtime.security.http.server import make_protocol
from forage_runtime.security.token_file import open_token_file
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.health import Health
from forage_runtime.telemetry.logs import get_logger

DRAIN_S = 20
KEEP_ALIVE_S = 75
"""Of an idle connection: longer than a training step without searches, so that clients keep their connections."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UserError: the corpus, the settings or the machine are at fault, or a port is in use.
    """
    require_all(list_checks(settings))
    asyncio.run(_serve(settings))
    if any(thread.name in (INDEX_THREAD, SEARCH_THREAD) and thread.is_alive() for thread in threading.enumerate()):
        # All requests are drained, but a build or a search still runs in FAISS or ONNX Runtime, which abort when the
        # interpreter exits under them. The next start removes the staging directory of an interrupted build.
        tracing.stop()
        sys.stderr.flush()
        os._exit(0)


class _HttpServer(uvicorn.Server):  # type: ignore[misc]
    """Leaves signals to this module, which has to stop more than HTTP."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(settings: Settings) -> None:
    log = get_logger()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready = Health()
    retrieval = Retrieval(settings.retriever.topk, ANSWER_LIMIT_S, settings.retriever.cache_bytes)
    own = settings.retriever
    tokens = open_token_file(own.auth_token_file, "retriever.auth_token_file")
    protocol = make_protocol(settings.tls, WIRE)
    listening = listen(own.http_address)
    grpc_server = GrpcServer(settings, retrieval, ready)
    await grpc_server.start()
    swap = None if settings.retriever.shards else IndexSwap(settings, retrieval)
    loop.add_signal_handler(signal.SIGHUP, swap.schedule_reload if swap is not None else _refuse_reload)
    config = uvicorn.Config(
        make_app(retrieval, ready, swap, tokens, needs_certificate=settings.tls.require_client_cert),
        http=protocol,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    http_server = _HttpServer(config)
    http = asyncio.create_task(http_server.serve([listening]))
    starting = asyncio.create_task(_load_source(settings, retrieval, ready, swap))
    stopping = asyncio.create_task(stop.wait())  # wait: the life of the service
    try:
        await asyncio.wait(
            [starting, stopping, http], return_when=asyncio.FIRST_COMPLETED
        )  # wait: the life of the service
        if starting.done():
            starting.result()
            ready.mark_started()
            await grpc_server.mark_serving()
            index = retrieval.provenance.index if retrieval.provenance else None
            log.info("serving", http=own.http_address, grpc=own.grpc_address, mode=own.mode, index=index)
            await asyncio.wait([stopping, http], return_when=asyncio.FIRST_COMPLETED)  # wait: the life of the service
        log.info("draining", grace_s=DRAIN_S)
    finally:
        ready.wait_for("stop", "draining")
        retrieval.drain()
        http_server.should_exit = True
        await asyncio.gather(grpc_server.stop(DRAIN_S), http)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(retrieval.stop(), DRAIN_S)  # wait: has a time limit, while the service stops
        starting.cancel()
        stopping.cancel()
    log.info("stopped")


def _refuse_reload() -> None:
    get_logger().warning("reload_refused", detail="this retriever merges the answers of shards: reload the shards")


async def _load_source(settings: Settings, retrieval: Retrieval, ready: Health, swap: IndexSwap | None) -> None:
    """Load the index of this process, or connect to shards."""
    if swap is not None:
        await swap.load_first(lambda what: ready.wait_for("start", what))
    else:
        from forage_retriever.serve.front import Front  # here: a tenth of the start without shards

        front = Front(settings, ready)
        retrieval.set_source(front)
        await front.start()
