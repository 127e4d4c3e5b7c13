"""Loading an index on a thread, at the start and to exchange it: the new one beside the old, no request failing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable

from prometheus_client import Counter, Info
from pydantic import BaseModel

from forage_common.errors import ForageError, UserError
from forage_common.settings import Settings
from forage_common.telemetry.logs import get_logger
from forage_retriever.hits import Provenance
from forage_retriever.index import load as index
from forage_retriever.index.load import Index
from forage_retriever.serve.retrieval import Retrieval
from forage_retriever.serve.source import LocalSource

INDEX_THREAD = "index"
SWAPS = Counter("forage_retriever_swaps_total", "Indexes exchanged while serving")
SWAP_FAILURES = Counter("forage_retriever_swap_failures_total", "New indexes that could not be loaded")
SERVED = Info("forage_retriever_index", "The index that is being searched: labels index, corpus, encoder, mode")


class ReloadError(ForageError):
    """The index was not exchanged; the message says why."""


class ReloadReply(BaseModel):
    """The index that is searched now; `swapped` is false where it was so before."""

    swapped: bool
    index: str
    corpus: str
    encoder: str
    mode: str


class IndexSwap:
    """Puts the index that the settings name behind a retrieval. All methods belong to one event loop."""

    def __init__(self, settings: Settings, retrieval: Retrieval) -> None:
        self._settings = settings
        self._retrieval = retrieval
        self._loading = False
        self._asked: asyncio.Task[None] | None = None

    async def load_first(self, waits_for: Callable[[str], None]) -> None:
        """Load the index and serve it; `waits_for` is told what is being done.

        Raises:
            UserError: the corpus, the settings or the machine are at fault.
        """
        self._serve(await self._load(waits_for))

    async def reload(self) -> ReloadReply:
        """Load what the settings' path names now and serve it; what is served goes on until then, and on failure.

        Raises:
            ReloadError: the new index cannot be loaded, or another is being loaded.
        """
        if self._loading:
            raise ReloadError("an index is being loaded already: ask again when it is served")
        before = self._retrieval.provenance
        log = get_logger()
        try:
            found = await self._load(lambda what: log.info("reloading", what=what))
        except UserError as error:
            SWAP_FAILURES.inc()
            log.error("reload_failed", reason=str(error))
            raise ReloadError(str(error)) from error
        except Exception:
            SWAP_FAILURES.inc()
            log.exception("reload_failed")
            raise
        source = found.provenance
        if source != before:
            self._serve(found)
            SWAPS.inc()
            log.info("swapped", index=source.index, passages=len(found.corpus))
        return ReloadReply(
            swapped=source != before,
            index=source.index,
            corpus=source.corpus,
            encoder=source.encoder,
            mode=source.mode,
        )

    def schedule_reload(self) -> None:
        """Reload without anybody who waits: what goes wrong is logged and counted where it does."""

        async def reload() -> None:
            with contextlib.suppress(Exception):
                await self.reload()

        self._asked = asyncio.create_task(reload())

    def _serve(self, found: Index) -> None:
        self._retrieval.set_source(LocalSource(found, self._settings.retriever.max_waiting))
        report_provenance(found.provenance)

    async def _load(self, waits_for: Callable[[str], None]) -> Index:
        """Load or build the index on a daemon thread: it may take long, and must not keep a process that is told to
        end."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Index] = loop.create_future()

        def settle(found: Index | BaseException) -> None:
            if done.cancelled():
                return
            if isinstance(found, BaseException):
                done.set_exception(found)
            else:
                done.set_result(found)

        def work() -> None:
            try:
                found: Index | BaseException = index.load_index(
                    self._settings.data.corpus, self._settings.retriever, waits_for
                )
                if isinstance(found, Index):
                    found.searcher.search(["what is it"], 1)  # an index that cannot be searched must not be served
            except BaseException as error:  # noqa: BLE001 - handed to the event loop
                found = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(settle, found)

        self._loading = True
        threading.Thread(target=contextvars.copy_context().run, args=(work,), name=INDEX_THREAD, daemon=True).start()
        try:
            return await done
        finally:
            self._loading = False


def report_provenance(source: Provenance) -> None:
    """Show on the metrics page what is being searched."""
    SERVED.info({"index": source.index, "corpus": source.corpus, "encoder": source.encoder, "mode": source.mode})
