"""Loads an index on a thread, at start and on reload: the old one serves until the new one is ready."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from dataclasses import asdict

from prometheus_client import Counter, Info
from pydantic import BaseModel

from forage_retriever.hits import Provenance
from forage_retriever.index import load as index
from forage_retriever.index.load import Index
from forage_retriever.serve.retrieval import Retrieval
from forage_retriever.serve.source import LocalSource
from forage_runtime.errors import ForageError, UserError
from forage_runtime.security.audit import record_act
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger

INDEX_THREAD = "index"
SWAPS = Counter("forage_retriever_swaps_total", "Indexes replaced while serving")
SWAP_FAILURES = Counter("forage_retriever_swap_failures_total", "New indexes that could not be loaded")
SERVED = Info("forage_retriever_index", "The index that is searched: labels index, corpus, encoder, mode")


class ReloadError(ForageError):
    """The index was not replaced; the message says why."""


class ReloadReply(BaseModel):
    """The index that is searched now; `swapped` is false where it did not change."""

    swapped: bool
    index: str
    corpus: str
    encoder: str
    mode: str


class IndexSwap:
    """Serves the index that the settings name through a retrieval. All methods belong to one event loop."""

    def __init__(self, settings: Settings, retrieval: Retrieval) -> None:
        self._settings = settings
        self._retrieval = retrieval
        self._loading = False
        self._reloading: asyncio.Task[None] | None = None
        self._is_queued = False

    async def load_first(self, report_wait: Callable[[str], None]) -> None:
        """Load the index and serve it; `report_wait` is called with what the load is waiting for.

        Raises:
            UserError: the corpus, the settings or the machine are at fault.
        """
        self._serve(await self._load(report_wait))

    async def reload(self, actor: str = "SIGHUP", peer: str = "") -> ReloadReply:
        """Load the index at the settings' path and serve it; until then, and on failure, the old one is served.

        Args:
            actor: who asks for it, as of `record_act`; likewise `peer`.

        Raises:
            ReloadError: the new index cannot be loaded, or another is being loaded.
        """
        if self._loading:
            raise ReloadError("an index is being loaded already: ask again when it is served")
        before = self._retrieval.provenance
        log = get_logger()
        try:
            loaded = await self._load(lambda what: log.info("reloading", what=what))
        except UserError as error:
            SWAP_FAILURES.inc()
            log.error("reload_failed", reason=str(error))
            self._record("refuse_index", actor, peer=peer, reason=str(error))
            raise ReloadError(str(error)) from error
        except Exception:
            SWAP_FAILURES.inc()
            log.exception("reload_failed")
            raise
        source = loaded.provenance
        if source != before:
            self._serve(loaded)
            SWAPS.inc()
            log.info("swapped", index=source.index, passages=len(loaded.corpus))
        name = "swap_index" if source != before else "reload_index"
        self._record(name, actor, peer=peer, index=source.index, before="" if before is None else before.index)
        return ReloadReply(swapped=source != before, **asdict(source))

    def schedule_reload(self) -> None:
        """Start a reload in the background, or one more after the load in progress: what that reads may be older than
        the signal. `reload` logs and counts failures.
        """
        if self._loading or (self._reloading is not None and not self._reloading.done()):
            get_logger().info("reload_queued", detail="an index is being loaded: another reload follows it")
            self._is_queued = True
        else:
            self._reloading = asyncio.create_task(self._reload_in_background())

    async def _reload_in_background(self) -> None:
        with contextlib.suppress(Exception):
            await self.reload()

    def _record(self, act: str, actor: str, **details: str) -> None:
        record_act(act, actor, self._settings.security.audit_file, **details)

    def _serve(self, loaded: Index) -> None:
        self._retrieval.set_source(LocalSource(loaded))
        report_provenance(loaded.provenance)

    async def _load(self, report_wait: Callable[[str], None]) -> Index:
        """Load or build the index on a daemon thread: it may take long, and must not delay the exit of the process."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Index] = loop.create_future()

        def settle(outcome: Index | BaseException) -> None:
            if done.cancelled():
                return
            if isinstance(outcome, BaseException):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        def work() -> None:
            try:
                outcome: Index | BaseException = index.load_index(
                    self._settings.data.corpus, self._settings.retriever, report_wait
                )
                if isinstance(outcome, Index):
                    outcome.searcher.search(["what is it"], 1)  # an index that cannot be searched must not be served
            except BaseException as error:  # noqa: BLE001 - handed to the event loop
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(settle, outcome)

        self._loading = True
        threading.Thread(target=contextvars.copy_context().run, args=(work,), name=INDEX_THREAD, daemon=True).start()
        try:
            return await done
        finally:
            self._loading = False
            if self._is_queued:
                self._is_queued = False
                self._reloading = asyncio.create_task(self._reload_in_background())


def report_provenance(source: Provenance) -> None:
    """Set the info metric of the index that is searched."""
    SERVED.info(asdict(source))
