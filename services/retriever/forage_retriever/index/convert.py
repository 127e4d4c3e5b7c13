"""Converts an index to another type from the vectors that it stores, without encoding its passages again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from forage_retriever.artifacts import compute_digest
from forage_retriever.index import manifest, space
from forage_retriever.index.building import dense_stages, stages
from forage_retriever.index.manifest import BM25_FOLDER, CORPUS_FOLDER, DENSE_FOLDER, Manifest
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import Recipe
from forage_retriever.index.workspace import open_workspace
from forage_retriever.search import faiss_build, faiss_cut, memory
from forage_retriever.search.vectors import VECTORS_FILE, map_vectors
from forage_runtime.errors import UserError
from forage_runtime.files import durable


def convert_index(old: Path, final: Path, staging_dir: Path, recipe: Recipe, report: Report) -> None:
    """Build the index folder `final` of the recipe's type from the vectors of the index `old`.

    Raises:
        UserError: the old index stores no vectors, or the recipe or the machine are at fault.
    """
    description = manifest.read_manifest(old)
    manifest.check_files(old, description)
    if description.dense is None or description.encoder is None:
        raise UserError(f"index {old} has no dense part to convert: build one with `forage index build`")
    precision, vectors = _map_vectors(old, description)
    name = compute_digest("convert/1", description.recipe, recipe.factory, str(recipe.vectors), precision)
    dimension, passages = description.encoder.dimension, description.passages
    with open_workspace(staging_dir, final, report) as workspace:
        if workspace is None:
            return
        for part in (CORPUS_FOLDER, BM25_FOLDER):
            if (old / part).is_dir():
                workspace.stage(part, description.recipe, lambda folder, part=part: _link_tree(old / part, folder))  # type: ignore[misc]
        space.check_disk(
            staging_dir, memory.estimate_needs(recipe.factory, dimension, passages).disk_bytes, "the index"
        )
        space.check_build_memory(recipe.factory, dimension, passages)
        key = compute_digest(description.corpus_digest, description.encoder.digest, precision)
        dense = dense_stages.build_dense(workspace, recipe, key, dimension, lambda: vectors, report)
        changed = {"recipe": name, "dense": dense, "made_with": manifest.list_versions()}
        stages.write_manifest(workspace, description.model_copy(update=changed), report)
        workspace.finish(final)


def _map_vectors(folder: Path, description: Manifest) -> tuple[str, NDArray[Any]]:
    """The precision of an index's vectors, and the vectors [n, d] mapped into memory."""
    assert description.dense is not None
    if description.dense.vectors:
        return description.dense.vectors, map_vectors(folder / DENSE_FOLDER / VECTORS_FILE)
    vectors = _map_flat_index(folder / DENSE_FOLDER, description.dense.factory)
    return str(vectors.dtype), vectors


def _map_flat_index(folder: Path, factory: str) -> NDArray[Any]:
    """The vectors [n, d] inside a FAISS index that keeps them.

    Raises:
        UserError: it does not keep them.
    """
    file = folder / faiss_build.INDEX_FILE
    vectors = faiss_cut.map_flat(file, faiss_build.read_index(file))
    if vectors is None:
        raise UserError(
            f"index {folder.parent} keeps no vectors and {factory} does not give them back: build it with --vectors"
        )
    return vectors


def _link_tree(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (target / path.relative_to(source)).mkdir()
        elif path.suffix != ".lock":
            durable.link_or_copy(path, target / path.relative_to(source))
