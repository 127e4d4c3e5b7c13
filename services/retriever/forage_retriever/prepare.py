"""`python -m forage_retriever.prepare [--config FILE] [key=value …]`: build the index ahead of the first start."""

from forage_retriever.index import load as index
from forage_runtime.service import run_service
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger


def prepare_index(settings: Settings) -> None:
    """Build the index of these settings if it is not there, and load it once.

    Raises:
        UserError: the corpus, the settings or the machine are at fault.
    """
    log = get_logger()
    loaded = index.load_index(settings.data.corpus, settings.retriever, lambda what: log.info("preparing", what=what))
    log.info("prepared", mode=loaded.provenance.mode, passages=len(loaded.corpus), index=loaded.provenance.index)


if __name__ == "__main__":
    run_service("retriever", prepare_index)
