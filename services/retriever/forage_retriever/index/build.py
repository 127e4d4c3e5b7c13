"""Builds an index folder from a corpus file, whole or cut into shards."""

from __future__ import annotations

from pathlib import Path

from forage_retriever.index import space
from forage_retriever.index.building import parts, shards, stages
from forage_retriever.index.building.shards import Processes
from forage_retriever.index.progress import Report, number_stages
from forage_retriever.index.recipe import Recipe
from forage_retriever.index.workspace import open_workspace
from forage_runtime.files.corpus import list_files


def build_index(
    final: Path,
    staging_dir: Path,
    corpus_file: Path,
    recipe: Recipe,
    report: Report,
    count: int = 1,
    processes: Processes | None = None,
    source: str = "",
) -> None:
    """Build the index folder `final` in `staging_dir`, from which a later build resumes if this one is killed.

    Args:
        count: number of shards; several become `final/shard-0` and so on, each with consecutive passages.
        processes: in which shards are built; None: in this one, one after the other.
        source: digest of the corpus file, where it is known.

    Raises:
        UserError: the corpus, the recipe or the machine are at fault.
    """
    source = source or stages.hash_source(corpus_file, report)
    name = recipe.compute_digest(source, count)
    with open_workspace(staging_dir, final, report) as workspace:
        if workspace is None:
            return
        space.check_disk(staging_dir, space.estimate_corpus_bytes(list_files(corpus_file)), "the passages")
        if count == 1:
            report = number_stages(report, parts.list_stages(recipe))
            corpus = stages.store_corpus(workspace, corpus_file, source, recipe.filter_fields, report)
            parts.build_parts(workspace, recipe, name, corpus, report)
        else:
            shards.build_shards(workspace, recipe, name, corpus_file, source, count, report, processes)
        workspace.finish(final)
