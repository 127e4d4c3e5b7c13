"""Builds the shards of an index: consecutive passages of one corpus, each a complete index folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forage_retriever.artifacts import compute_digest
from forage_retriever.corpus.store import Corpus, CorpusWriter
from forage_retriever.index import space
from forage_retriever.index.building import parts, processes, stages
from forage_retriever.index.manifest import CORPUS_FOLDER, DENSE_FOLDER, DenseEntry, EncoderEntry, ShardEntry
from forage_retriever.index.progress import Report, number_stages
from forage_retriever.index.recipe import CORPUS_RECIPE, Recipe, load_encoder
from forage_retriever.index.workspace import Workspace, hold_workspace
from forage_retriever.search import memory
from forage_runtime.devices import count_cpus
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings

if TYPE_CHECKING:
    from forage_retriever.search.corpus_statistics import CorpusStatistics

WHOLE = "whole"
"""The temporary stage of the passages of all shards."""

_REPORT_EVERY = 1000
_PROCESS_BYTES = 2**30
"""Memory of a process of a build beside its index: libraries, an encoder, BM25's buffer."""


@dataclass(frozen=True)
class Processes:
    """Builds shards in several processes at once.

    Attributes:
        count: at once; 0 = as many as CPUs, memory and GPUs allow.
        settings: from which each process loads its encoder.
    """

    count: int
    settings: RetrieverSettings


@dataclass(frozen=True)
class FlatSource:
    """A FAISS file of flat codes, of which each shard gets its rows.

    Attributes:
        encoder: of its vectors.
        digest: of the file.
        factory: its type, for the manifest.
    """

    file: Path
    encoder: EncoderEntry
    digest: str
    factory: str


@dataclass(frozen=True)
class _Shard:
    """All that another process needs to build one shard.

    Attributes:
        folder: the work folder of the whole build.
        end: its last passage is the one before.
        counted: whether there are statistics of the words of the whole corpus.
        settings: to load the encoder from; None = the recipe has it.
        flat: where its vectors come from; None = they are encoded.
    """

    folder: Path
    recipe: Recipe
    name: str
    entry: ShardEntry
    end: int
    counted: bool
    settings: RetrieverSettings | None
    flat: FlatSource | None


def build_shards(
    workspace: Workspace,
    recipe: Recipe,
    name: str,
    corpus_file: Path,
    source: str,
    count: int,
    report: Report,
    several: Processes | None,
    flat: FlatSource | None = None,
) -> None:
    """Store the passages of a corpus file, and build every shard of them.

    Raises:
        UserError: of a shard; the others are stopped, and continue when the build resumes.
    """
    whole = stages.store_corpus(workspace, corpus_file, source, recipe.filter_fields, report, WHOLE)
    if count > len(whole):
        raise UserError(f"--shards {count} is more than the {len(whole)} passages of the corpus: cut it into fewer")
    ends = [(number + 1) * len(whole) // count for number in range(count)]
    counted = stages.count_words(workspace, recipe, whole, ends, report) is not None
    jobs = 1
    if several is not None:
        jobs = several.count or choose_processes(recipe, several.settings, -(-len(whole) // count), count)
        recipe = _share_threads(recipe, several.settings, min(jobs, count))
    work: list[Callable[[Report], None]] = []
    for number in range(count):
        entry = ShardEntry(number=number, of=count, first=number * len(whole) // count)
        # FAISS and ONNX Runtime do not survive a fork, and encoders cannot be sent: each process loads its own.
        settings = several.settings if several is not None and jobs > 1 else None
        own = recipe if settings is None else replace(recipe, encoder=None)
        shard = _Shard(workspace.folder, own, name, entry, ends[number], counted, settings, flat)
        work.append(partial(_build_shard, shard))
    if jobs > 1:
        report(f"builds {count} shards, {min(jobs, count)} at once, each with {recipe.threads} threads", 0, None)
    processes.run_all(work, jobs, report)
    for stage in (WHOLE, stages.STATISTICS):
        workspace.drop(stage)


def choose_processes(recipe: Recipe, settings: RetrieverSettings, passages: int, count: int) -> int:
    """How many of `count` shards of so many passages to build at once, by CPUs and memory."""
    needed = _PROCESS_BYTES
    if recipe.encoder is not None:
        needed += memory.estimate_needs(recipe.factory, recipe.encoder.dimension, passages).build_bytes
        if recipe.encoder.device.startswith("cuda"):
            return 1  # one process already fills the GPU
    fitting = space.measure_available_memory() // needed
    return max(1, min(count, count_cpus() // max(settings.threads, 1), fitting))


def _share_threads(recipe: Recipe, settings: RetrieverSettings, jobs: int) -> Recipe:
    """The recipe with its share of the CPUs, where the settings do not say how many threads it has."""
    return recipe if settings.threads else replace(recipe, threads=max(1, recipe.threads // jobs))


def _build_shard(shard: _Shard, report: Report) -> None:
    """Build one shard, in this process."""
    entry, recipe = shard.entry, shard.recipe
    if shard.settings is not None and shard.flat is None:
        recipe = replace(recipe, encoder=load_encoder(shard.settings, building=True))
    whole = Corpus(shard.folder / WHOLE)
    place = f"shard-{entry.number}"
    statistics = None
    if shard.counted:
        from forage_retriever.search.corpus_statistics import CorpusStatistics

        statistics = CorpusStatistics(shard.folder / stages.STATISTICS)

    def tell(sentence: str) -> None:
        report(sentence, 0, None)

    def write(folder: Path) -> None:
        writer = CorpusWriter(folder, recipe.filter_fields)
        for row in range(entry.first, shard.end):
            writer.add_passage(whole[row])
            if (row + 1) % _REPORT_EVERY == 0:
                report(stages.READING, row + 1 - entry.first, shard.end - entry.first)
        writer.finish()

    with hold_workspace(shard.folder / place, shard.folder / "index" / place, lambda: None, tell) as part:
        if part is None:
            return
        key = compute_digest(CORPUS_RECIPE, whole.digest, str(entry.first), str(shard.end))
        corpus = Corpus(part.stage(CORPUS_FOLDER, key, write))
        if shard.flat is None:
            numbered = number_stages(report, parts.list_stages(recipe))
            parts.build_parts(part, recipe, shard.name, corpus, numbered, entry, statistics)
        else:
            _build_cut(part, recipe, shard, shard.flat, corpus, report, statistics)
        part.finish(shard.folder / "index" / place)


def _build_cut(
    part: Workspace,
    recipe: Recipe,
    shard: _Shard,
    flat: FlatSource,
    corpus: Corpus,
    report: Report,
    statistics: CorpusStatistics | None,
) -> None:
    """Build all parts of a shard whose vectors are rows of a FAISS file."""
    from forage_retriever.search import faiss_build, faiss_cut

    space.check_disk(part.folder, faiss_cut.measure_rows(flat.file, len(corpus)), f"a shard of {len(corpus)} passages")
    bm25 = stages.build_bm25(part, recipe, corpus, report, statistics, shard.entry.number)
    first = shard.entry.first

    def write(folder: Path) -> None:
        def progress(done: int) -> None:
            report("cutting vectors", done, len(corpus))

        faiss_cut.cut_rows(flat.file, first, shard.end, folder / faiss_build.INDEX_FILE, progress)

    digest = compute_digest("adopt/2", corpus.digest, flat.encoder.digest, flat.digest, str(first))
    part.stage(DENSE_FOLDER, digest, write)
    dense = DenseEntry(digest=digest, recipe=faiss_build.RECIPE, factory=flat.factory, vectors="")
    description = stages.describe_index(shard.name, corpus, bm25, flat.encoder, dense, shard.entry)
    stages.write_manifest(part, description, report)
