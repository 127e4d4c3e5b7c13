"""Builds index folders: corpus, word index, vectors, vector index, manifest.

Each stage ends in a checkpoint and encoding has one every few thousand passages, so a build that was killed goes on
where it was and gives what it would have given. Nothing but the FAISS index itself is held in memory.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from forage_common.errors import DataError, UserError
from forage_common.files import durable
from forage_common.settings import RetrievalMode, RetrieverSettings
from forage_retriever.artifacts import digest_of, unwritable
from forage_retriever.corpus import read
from forage_retriever.corpus.store import Corpus, CorpusWriter, DuplicateIdError
from forage_retriever.index import manifest, space, work
from forage_retriever.index.manifest import (
    BM25_FOLDER,
    CORPUS_FOLDER,
    DENSE_FOLDER,
    Bm25Entry,
    DenseEntry,
    EncoderEntry,
    Manifest,
    ShardEntry,
    Vectors,
)
from forage_retriever.index.progress import Report
from forage_retriever.index.recipe import CORPUS_RECIPE, Recipe, dense_recipe
from forage_retriever.index.work import Work
from forage_retriever.search import memory
from forage_retriever.search.vectors import VECTORS_FILE, VectorsWriter, blocks, mapped, sample, save

if TYPE_CHECKING:
    from forage_retriever.encoders.encoder import Encoder

PART = 4096
"""Passages that are encoded between two checkpoints."""

CACHED_WORK = ".index-"
_VECTORS, _TRAINED, _WHOLE = "vectors", "trained", "whole"
_REPORTED = 1000
_LIBRARIES = ("forage-retriever", "numpy", "faiss-cpu", "faiss-gpu", "tantivy", "onnxruntime", "tokenizers", "torch")


def load_encoder(settings: RetrieverSettings, building: bool) -> Encoder | None:
    """The encoder that the mode of these settings needs, if any; `building` allows for torch.

    Raises:
        UserError: there is no such encoder, or no such type of index.
    """
    if settings.mode is RetrievalMode.BM25:
        return None
    # Imported here: BM25 alone starts in a second and needs neither FAISS nor an encoder.
    from forage_retriever.encoders import encoder
    from forage_retriever.search import faiss_build

    found = encoder.load(settings, building=building)
    faiss_build.empty_index(settings.faiss_factory, found.dimension)  # a wrong factory string ends the start here
    return found


def cached(corpus_file: Path, settings: RetrieverSettings, encoder: Encoder | None, report: Report) -> Path:
    """The index of a corpus file in `settings.cache_dir`, built if it is not there.

    Of two processes that build the same, one waits for the other.

    Raises:
        UserError: the corpus, the settings or the machine are at fault.
    """
    recipe = Recipe.of(settings, encoder)
    name = f"{recipe.mode}-{recipe.digest(read.digest(corpus_file))[:16]}"
    final = settings.cache_dir / name
    if not final.exists():
        work.sweep(settings.cache_dir, CACHED_WORK)
        try:
            build(final, settings.cache_dir / f"{CACHED_WORK}{name}", corpus_file, recipe, report)
        except DataError:
            with contextlib.suppress(OSError):  # there are other things in it
                settings.cache_dir.rmdir()
            raise
    return final


def build(final: Path, aside: Path, corpus_file: Path, recipe: Recipe, report: Report, shards: int = 1) -> None:
    """Build the index folder `final` by way of `aside`, which a killed build leaves to go on from; several shards
    become `final/shard-0` and so on, each with consecutive passages.

    Raises:
        UserError: the corpus, the recipe or the machine are at fault.
    """
    source = read.digest(corpus_file)
    name = recipe.digest(source, shards)
    with _working(aside, final, report) as making:
        if making is None:
            return
        space.check_disk(aside, space.corpus_bytes(read.files(corpus_file)), "the passages")
        key = digest_of(CORPUS_RECIPE, source, *recipe.filter_fields)

        def fill(folder: Path) -> None:
            _store(folder, corpus_file, recipe.filter_fields, report)

        if shards == 1:
            _index(making, recipe, name, key, fill, report)
        else:
            whole = Corpus(making.stage(_WHOLE, key, fill, aside=True))
            _cut(making, recipe, name, whole, shards, report)
            making.drop(_WHOLE)
        making.finish(final)


def convert(old: Path, final: Path, aside: Path, recipe: Recipe, report: Report) -> None:
    """Make another type of index from the vectors that an index keeps, without encoding its passages again.

    Raises:
        UserError: the old index keeps no vectors, or the recipe or the machine are at fault.
    """
    kept = manifest.read(old)
    manifest.check(old, kept)
    if kept.dense is None or kept.encoder is None:
        raise UserError(f"index {old} has no dense part to convert: build one with `forage index build`")
    exact, vectors = _stored(old, kept)
    name = digest_of("convert/1", kept.recipe, recipe.factory, str(recipe.vectors), exact)
    with _working(aside, final, report) as making:
        if making is None:
            return
        for part in (CORPUS_FOLDER, BM25_FOLDER):
            if (old / part).is_dir():
                making.stage(part, kept.recipe, lambda folder, part=part: _link_tree(old / part, folder))  # type: ignore[misc]
        space.check_disk(
            aside, memory.needs(recipe.factory, kept.encoder.dimension, kept.passages).disk_bytes, "the index"
        )
        space.check_build_memory(recipe.factory, kept.encoder.dimension, kept.passages)
        key = digest_of(kept.corpus_digest, kept.encoder.digest, exact)
        dense = _dense(making, recipe, key, kept.encoder, kept.passages, lambda: vectors, report)
        _finish(making, kept.model_copy(update={"recipe": name, "dense": dense, "made_with": _versions()}), report)
        making.finish(final)


def adopt(final: Path, aside: Path, faiss_file: Path, corpus_file: Path, recipe: Recipe, report: Report) -> None:
    """Make an index folder of a FAISS file and the corpus that it was built from.

    Raises:
        UserError: they do not belong together, or not to the recipe's encoder, or the machine is at fault.
    """
    from forage_retriever.index import adoption

    assert recipe.encoder is not None
    encoder = recipe.encoder
    factory = adoption.inspected(faiss_file, encoder.dimension)
    source = read.digest(corpus_file)
    name = digest_of("adopt/1", recipe.digest(source), read.digest(faiss_file))
    with _working(aside, final, report) as making:
        if making is None:
            return

        def fill(folder: Path) -> None:
            _store(folder, corpus_file, recipe.filter_fields, report)

        corpus = Corpus(making.stage(CORPUS_FOLDER, digest_of(CORPUS_RECIPE, source, *recipe.filter_fields), fill))
        words = _words(making, recipe, corpus, report)
        digest = digest_of("adopt/1", corpus.digest, encoder.digest, read.digest(faiss_file))
        making.stage(DENSE_FOLDER, digest, lambda folder: adoption.adopt(folder, faiss_file, corpus, encoder))
        dense = DenseEntry(digest=digest, recipe=dense_recipe(), factory=factory, vectors="")
        _finish(making, _manifest(name, corpus, words, _entry(encoder), dense), report)
        making.finish(final)


def _cut(making: Work, recipe: Recipe, name: str, whole: Corpus, shards: int, report: Report) -> None:
    if shards > len(whole):
        raise UserError(f"--shards {shards} is more than the {len(whole)} passages of the corpus: cut it into fewer")
    for number in range(shards):
        begin, end = number * len(whole) // shards, (number + 1) * len(whole) // shards

        def fill(folder: Path, begin: int = begin, end: int = end) -> None:
            writer = CorpusWriter(folder, recipe.filter_fields)
            for passage in whole[begin:end]:
                writer.add(passage)
            writer.finish()

        def told(stage: str, done: int, total: int | None, number: int = number) -> None:
            report(f"shard {number}: {stage}", done, total)

        with work.held(making.folder / f"shard-{number}", making.index / f"shard-{number}", lambda: None) as part:
            if part is not None:
                shard = ShardEntry(number=number, of=shards, first=begin)
                key = digest_of(CORPUS_RECIPE, whole.digest, str(begin), str(end))
                _index(part, recipe, name, key, fill, told, shard)
                part.finish(making.index / f"shard-{number}")


def _index(
    making: Work,
    recipe: Recipe,
    name: str,
    key: str,
    fill: Callable[[Path], None],
    report: Report,
    shard: ShardEntry | None = None,
) -> None:
    """Everything of one index folder, from the stage that fills its corpus to its manifest."""
    corpus = Corpus(making.stage(CORPUS_FOLDER, key, fill))
    space.check_disk(making.folder, _to_come(making, recipe, corpus), f"an index of {len(corpus)} passages")
    encoder = recipe.encoder
    if encoder is not None:
        space.check_build_memory(recipe.factory, encoder.dimension, len(corpus))
    words = _words(making, recipe, corpus, report)
    dense = None
    if encoder is not None:
        vectors_key = digest_of(corpus.digest, encoder.digest)

        def encoded() -> NDArray[Any]:
            folder = making.stage(
                _VECTORS,
                vectors_key,
                lambda folder: _encode(folder, vectors_key, corpus, encoder, report),
                aside=True,
                goes_on=True,
            )
            return mapped(folder / VECTORS_FILE)

        dense = _dense(making, recipe, vectors_key, _entry(encoder), len(corpus), encoded, report)
    _finish(making, _manifest(name, corpus, words, _entry(encoder) if encoder else None, dense, shard), report)


def _store(folder: Path, corpus_file: Path, filter_fields: Sequence[str], report: Report) -> None:
    report("reading passages", 0, None)
    writer = CorpusWriter(folder, filter_fields)
    count = 0
    for count, (where, passage) in enumerate(read.numbered(corpus_file), 1):
        writer.add(passage, where)
        if count % _REPORTED == 0:
            report("reading passages", count, None)
    if not count:
        raise DataError(f"corpus {corpus_file} has no passages: write one JSON object with id and contents a line")
    report("reading passages", count, count)
    try:
        writer.finish()
    except DuplicateIdError as error:
        places = [where for where, passage in read.numbered(corpus_file) if passage.id == error.id]
        raise DataError(f"{places[1]}: id {error.id!r} is already that of {places[0]}: make ids unique") from None


def _words(making: Work, recipe: Recipe, corpus: Corpus, report: Report) -> Bm25Entry | None:
    if recipe.mode is RetrievalMode.DENSE:
        making.drop(BM25_FOLDER)
        return None
    from forage_retriever.search import bm25

    digest = digest_of(bm25.RECIPE, corpus.digest, *recipe.filter_fields)

    def make(folder: Path) -> None:
        bm25.build(folder, corpus, lambda done: report("indexing words", done, len(corpus)))

    making.stage(BM25_FOLDER, digest, make)
    return Bm25Entry(digest=digest, recipe=bm25.RECIPE)


def _encode(folder: Path, key: str, corpus: Corpus, encoder: Encoder, report: Report) -> None:
    stage = "encoding passages"
    with contextlib.closing(VectorsWriter(folder, key, len(corpus), encoder.dimension)) as writer:
        while (begin := writer.done) < len(corpus):
            report(stage, begin, len(corpus))
            writer.append(encoder.passages(corpus.contents[begin : begin + PART], _from(begin, corpus, report, stage)))
        report(stage, len(corpus), len(corpus))


def _from(begin: int, corpus: Corpus, report: Report, stage: str) -> Callable[[int], None]:
    return lambda done: report(stage, begin + done, len(corpus))


def _dense(
    making: Work,
    recipe: Recipe,
    key: str,
    encoder: EncoderEntry,
    passages: int,
    vectors: Callable[[], NDArray[Any]],
    report: Report,
) -> DenseEntry:
    """The vector index over vectors that `key` names; they are asked for only if it is not there yet."""
    from forage_retriever.search import faiss_build

    kept: Vectors = recipe.vectors if recipe.vectors is not None else _kept_by_default(recipe, encoder.dimension)
    digest = digest_of(faiss_build.RECIPE, key, recipe.factory, kept)

    def make(folder: Path) -> None:
        found = vectors()
        index = _filled(making, recipe, digest, found, report)
        faiss_build.write(index, folder / faiss_build.INDEX_FILE)
        if kept:
            save(found, folder / VECTORS_FILE, kept)

    making.stage(DENSE_FOLDER, digest, make)
    for name in (_VECTORS, _TRAINED):
        making.drop(name)
    return DenseEntry(digest=digest, recipe=faiss_build.RECIPE, factory=recipe.factory, vectors=kept)


def _filled(making: Work, recipe: Recipe, key: str, vectors: NDArray[Any], report: Report) -> Any:
    import faiss

    from forage_retriever.search import faiss_build

    faiss.omp_set_num_threads(recipe.threads)
    count, dimension = vectors.shape
    index = faiss_build.empty_index(recipe.factory, dimension)
    if rows := faiss_build.training_rows(index, count):

        def train(folder: Path) -> None:
            report("training", 0, None)
            faiss_build.train(index, recipe.factory, sample(vectors, rows))
            faiss_build.write(index, folder / faiss_build.INDEX_FILE)

        trained = making.stage(_TRAINED, key, train, aside=True)
        index = faiss.read_index(str(trained / faiss_build.INDEX_FILE))
    done = 0
    for block in blocks(vectors):
        faiss_build.add(index, recipe.factory, block)
        done += len(block)
        report("indexing vectors", done, count)
    faiss_build.checked(index, recipe.factory, sample(vectors, 1))
    return index


def _kept_by_default(recipe: Recipe, dimension: int) -> Vectors:
    from forage_retriever.search import faiss_build

    return "float16" if faiss_build.wants_vectors(recipe.factory, dimension) else ""


def _stored(folder: Path, kept: Manifest) -> tuple[str, NDArray[Any]]:
    """The vectors of an index and how exact they are."""
    from forage_retriever.index import adoption

    assert kept.dense is not None
    if kept.dense.vectors:
        return kept.dense.vectors, mapped(folder / DENSE_FOLDER / VECTORS_FILE)
    return "float32", adoption.reconstructed(folder / DENSE_FOLDER, kept.dense.factory)


def _link_tree(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (target / path.relative_to(source)).mkdir()
        elif path.suffix != ".lock":
            durable.link_or_copy(path, target / path.relative_to(source))


def _finish(making: Work, made: Manifest, report: Report) -> None:
    """Write the manifest, with the digest of every file."""
    done = 0

    def progress(read: int) -> None:
        nonlocal done
        done += read
        report("digesting bytes", done, None)

    files = manifest.entries(making.index, progress)
    manifest.write(making.index, made.model_copy(update={"files": files}))


def _manifest(
    name: str,
    corpus: Corpus,
    words: Bm25Entry | None,
    encoder: EncoderEntry | None,
    dense: DenseEntry | None,
    shard: ShardEntry | None = None,
) -> Manifest:
    return Manifest(
        format=manifest.FORMAT,
        recipe=name,
        passages=len(corpus),
        corpus_digest=corpus.digest,
        corpus_bytes=corpus.bytes,
        filter_fields=corpus.columns.fields,
        bm25=words,
        encoder=encoder,
        dense=dense,
        shard=shard,
        made_with=_versions(),
        files={},
    )


def _entry(encoder: Encoder) -> EncoderEntry:
    return EncoderEntry(
        digest=encoder.digest,
        family=encoder.family,
        model=encoder.model,
        convention=encoder.convention.name,
        precision=encoder.precision,
        dimension=encoder.dimension,
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def _to_come(making: Work, recipe: Recipe, corpus: Corpus) -> int:
    """Bytes that the stages after the corpus will write, about."""
    needed = 0 if recipe.mode is RetrievalMode.DENSE else space.words_bytes(corpus.bytes)
    if recipe.encoder is not None:
        needed += space.dense_bytes(recipe.factory, recipe.encoder.dimension, len(corpus))
    return max(needed - space.used_bytes(making.folder) + corpus.bytes, 0)


@contextlib.contextmanager
def _working(aside: Path, final: Path, report: Report) -> Iterator[Work | None]:
    """The work folder, for this process alone; what a bad corpus left in it goes, other work stays to go on with."""
    try:
        with work.held(aside, final, lambda: report("waiting for another process that builds it", 0, None)) as making:
            try:
                yield making
            except DataError:
                if making is not None:
                    making.discard()
                raise
    except OSError as error:
        raise unwritable(final.parent, error) from None
