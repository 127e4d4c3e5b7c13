"""The cache of indexes that the retriever builds itself, from a corpus file, where no index folder is given."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from forage_retriever.corpus import read
from forage_retriever.encoders.encoder import Encoder
from forage_retriever.index import workspace
from forage_retriever.index.build import build_index
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import Recipe
from forage_runtime.errors import DataError
from forage_runtime.settings import RetrieverSettings

STAGING_PREFIX = ".index-"


def build_cached(corpus_file: Path, settings: RetrieverSettings, encoder: Encoder | None, report: Report) -> Path:
    """The index of a corpus file in `settings.cache_dir`, built if it is not there.

    Of two processes that build the same index, one waits for the other.

    Raises:
        UserError: the corpus, the settings or the machine are at fault.
    """
    recipe = Recipe.from_settings(settings, encoder)
    name = f"{recipe.mode}-{recipe.compute_digest(read.hash_corpus(corpus_file))[:16]}"
    final = settings.cache_dir / name
    if not final.exists():
        workspace.remove_abandoned(settings.cache_dir, STAGING_PREFIX)
        try:
            build_index(final, settings.cache_dir / f"{STAGING_PREFIX}{name}", corpus_file, recipe, report)
        except DataError:
            with contextlib.suppress(OSError):  # not empty: it holds other artifacts
                settings.cache_dir.rmdir()
            raise
    return final


def remove_cached(folder: Path) -> None:
    """Remove an index from the cache: out of sight first, so that no process finds a part of it."""
    aside = Path(tempfile.mkdtemp(prefix=f".damaged-{folder.name}-", dir=folder.parent))
    try:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            folder.rename(aside / folder.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
