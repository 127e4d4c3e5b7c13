"""`python -m forage_retriever.prepare [--config FILE] [key=value …]`: build what is kept, so that a start is quick."""

from forage_common.service import run_service
from forage_common.settings import Settings
from forage_common.telemetry.logs import get_logger
from forage_retriever.index import load as index


def prepare(settings: Settings) -> None:
    """Load or build the index of these settings, and end.

    Raises:
        UserError: the corpus, the settings or the machine are at fault.
    """
    log = get_logger()
    found = index.load(settings.data.corpus, settings.retriever, lambda what: log.info("preparing", what=what))
    log.info("prepared", mode=found.provenance.mode, passages=len(found.corpus), index=found.provenance.index)


if __name__ == "__main__":
    run_service("retriever", prepare)
