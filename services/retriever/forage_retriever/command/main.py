"""`forage index`: build, look at, check, measure and convert indexes. Runs in this service's own environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from forage_common.errors import ForageError, SettingsError, UserError
from forage_common.settings import RetrievalMode, Settings, load_settings
from forage_common.telemetry.logs import configure_logs
from forage_retriever.corpus.read import hash_corpus as corpus_digest
from forage_retriever.index import manifest
from forage_retriever.index.build import build_index
from forage_retriever.index.manifest import DamagedError, Manifest, Vectors
from forage_retriever.index.progress import open_report
from forage_retriever.index.recipe import Recipe, load_encoder

_EVERYTHING = sys.maxsize

Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings, e.g. retriever.threads=8 retriever.encoder.model=DIR.", show_default=False),
]
Folder = Annotated[Path, typer.Argument(help="An index folder.", show_default=False)]
Corpus = Annotated[
    Path | None,
    typer.Option(help="JSONL, JSONL.gz, Parquet, or a folder of these (data.corpus).", show_default=False),
]
Mode = Annotated[RetrievalMode | None, typer.Option(help="What to build (retriever.mode).", show_default=False)]
Factory = Annotated[
    str, typer.Option("--faiss-factory", "-f", help="Type of the dense index (retriever.faiss_factory).")
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--filter-field", help="A field that requests may filter by (retriever.filter_fields).", show_default=False
    ),
]
Kept = Annotated[
    str, typer.Option("--vectors", help="Keep vectors: none, float16, float32; auto = where the type gains by them.")
]

app = typer.Typer(
    help="Indexes: folders that the retriever serves, each with a manifest of digests.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command(
    epilog="""[bold]Examples[/]

    forage index build wiki --corpus wiki-18.jsonl.gz --faiss-factory HNSW32

    forage index build wiki --corpus parts/ --shards 4 --filter-field lang retriever.encoder.model=models/e5-base-v2

    forage index build words --corpus docs.parquet --mode bm25"""
)
def build(
    out: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    overrides: Overrides = None,
    corpus: Corpus = None,
    mode: Mode = None,
    faiss_factory: Factory = "",
    filter_field: Fields = None,
    vectors: Kept = "auto",
    shards: Annotated[int, typer.Option(help="Cut the corpus into so many indexes.", min=1)] = 1,
    config: Config = None,
) -> None:
    """Build an index folder. If it is killed, the same command goes on where it was."""
    settings = _load_settings(config, overrides, corpus=corpus, mode=mode, factory=faiss_factory, fields=filter_field)
    encoder = load_encoder(settings.retriever, building=True)
    recipe = Recipe.from_settings(settings.retriever, encoder, _parse_vectors(vectors))
    _check_target(out, recipe.compute_digest(corpus_digest(settings.data.corpus), shards))
    with open_report() as report:
        build_index(out, _staging_dir(out), settings.data.corpus, recipe, report, shards)
    _print_index(out)


@app.command(
    epilog="""[bold]Examples[/]

    forage index convert wiki wiki-small --faiss-factory IVF4096,SQ8

    forage index convert wiki --faiss e5_Flat.index --corpus wiki-18.jsonl retriever.encoder.model=models/e5-base-v2"""
)
def convert(
    folders: Annotated[
        list[str], typer.Argument(help="OLD NEW, or NEW with --faiss; then settings.", metavar="[OLD] NEW")
    ],
    faiss: Annotated[
        Path | None, typer.Option(help="A FAISS file that was built elsewhere.", show_default=False)
    ] = None,
    corpus: Corpus = None,
    mode: Mode = None,
    faiss_factory: Factory = "",
    filter_field: Fields = None,
    vectors: Kept = "auto",
    config: Config = None,
) -> None:
    """Make another type of index without encoding again, or an index folder of a FAISS file and its corpus."""
    named = [Path(word) for word in folders if "=" not in word]
    overrides = [word for word in folders if "=" in word]
    settings = _load_settings(config, overrides, corpus=corpus, mode=mode, factory=faiss_factory, fields=filter_field)
    if len(named) != (2 if faiss is None else 1):
        raise SettingsError("convert takes OLD NEW --faiss-factory TYPE, or NEW --faiss FILE --corpus FILE")
    new = named[-1]
    if new.exists():
        raise SettingsError(f"{new} is there already: give a new folder")
    with open_report() as report:
        if faiss is None:
            from forage_retriever.index.convert import convert_index

            recipe = Recipe.from_settings(settings.retriever, None, _parse_vectors(vectors))
            convert_index(named[0], new, _staging_dir(new), recipe, report)
        else:
            from forage_retriever.index.adopt import adopt_index

            if settings.retriever.mode is RetrievalMode.BM25:
                raise SettingsError("--mode bm25 has no use for --faiss: use `forage index build`")
            recipe = Recipe.from_settings(settings.retriever, load_encoder(settings.retriever, building=False))
            adopt_index(new, _staging_dir(new), faiss, settings.data.corpus, recipe, report)
    _print_index(new)


@app.command()
def inspect(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False
) -> None:
    """Show what an index holds, what it was made from and the memory that it needs."""
    for one in _list_indexes(folder):
        if as_json:
            typer.echo(manifest.read_manifest(one).model_dump_json(indent=1))
        else:
            _print_index(one)


@app.command()
def verify(folder: Folder) -> None:
    """Check every file against the manifest. Exit code 1: one is damaged, and named."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    for one in _list_indexes(folder):
        try:
            kept = manifest.read_manifest(one)
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                task = progress.add_task("checking", total=manifest.sum_bytes(kept.files))
                manifest.check_files(one, kept, _advance(progress, task), _EVERYTHING)
        except DamagedError as error:
            console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        typer.echo(f"{one}: all {len(kept.files)} files are as they were built")


@app.command(
    "eval",
    epilog="[bold]Example[/]: forage index eval wiki questions.jsonl --sweep --out report",
)
def evaluate(
    folder: Folder,
    questions: Annotated[Path, typer.Argument(help="JSONL: question, gold_ids.", show_default=False)],
    overrides: Overrides = None,
    sweep: Annotated[bool, typer.Option(help="Also over ef_search, nprobe and refine.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for tables and plot.", show_default=False)] = None,
    config: Config = None,
) -> None:
    """Measure recall and hits on questions whose passages are known, by mode."""
    from forage_retriever.command.evaluate import evaluate_index

    evaluate_index(folder, questions, load_settings(config, overrides or []).retriever, out, sweep)


@app.command(epilog="[bold]Example[/]: forage index bench wiki --seconds 10 retriever.threads=4")
def bench(
    folder: Folder,
    overrides: Overrides = None,
    questions: Annotated[Path | None, typer.Option(help="JSONL: question.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(help="For each batch size.", min=0.1)] = 5.0,
    config: Config = None,
) -> None:
    """Measure queries a second and their latency, in this process."""
    from forage_retriever.command.bench import benchmark_index

    benchmark_index(folder, load_settings(config, overrides or []).retriever, seconds, questions)


def main() -> None:
    """Entry point of `python -m forage_retriever.command`: a user's error is one sentence and exit code 2."""
    configure_logs("retriever", "INFO")
    errors = Console(stderr=True, soft_wrap=True)
    try:
        app(prog_name="forage index")
    except ForageError as error:
        errors.print(f"forage: {error}", style="red", markup=False, highlight=False)
        sys.exit(error.exit_code if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        errors.print("stopped: the same command goes on from here", markup=False)
        sys.exit(130)


def _load_settings(
    config: Path | None,
    overrides: list[str] | None,
    corpus: Path | None,
    mode: RetrievalMode | None,
    factory: str,
    fields: list[str] | None,
) -> Settings:
    """Options are short for settings, and come after them."""
    given = list(overrides or [])
    if corpus is not None:
        given.append(f"data.corpus={corpus}")
    if mode is not None:
        given.append(f"retriever.mode={mode}")
    if factory:
        given.append(f"retriever.faiss_factory={factory}")
    settings = load_settings(config, given)
    if fields:
        settings = settings.model_copy(
            update={"retriever": settings.retriever.model_copy(update={"filter_fields": tuple(fields)})}
        )
    return settings


def _parse_vectors(asked: str) -> Vectors | None:
    named: dict[str, Vectors | None] = {"auto": None, "none": "", "float16": "float16", "float32": "float32"}
    if asked not in named:
        raise SettingsError(f"--vectors is {asked!r}: give {', '.join(named)}")
    return named[asked]


def _staging_dir(out: Path) -> Path:
    return out.absolute().parent / f".{out.name}.building"


def _check_target(out: Path, recipe: str) -> None:
    """A folder that is there may only be this very index, of a build that ended before."""
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if not out.exists():
        return
    made = [manifest.read_manifest(folder).recipe for folder in _list_indexes(out)]
    if set(made) != {recipe}:
        raise SettingsError(f"{out} is there already and is another index: give a new folder, or delete it")


def _list_indexes(folder: Path) -> list[Path]:
    return manifest.list_shards(folder) or [folder]


def _advance(progress: Progress, task: TaskID) -> Callable[[int], None]:
    return lambda read: progress.advance(task, read)


def _print_index(folder: Path) -> None:
    for one in _list_indexes(folder):
        Console(soft_wrap=True).print(_index_table(one, manifest.read_manifest(one)), markup=False)


def _index_table(folder: Path, kept: Manifest) -> Table:
    table = Table(Column(), Column(overflow="fold"), title=str(folder), show_header=False, title_justify="left")
    rows = {
        "passages": f"{kept.passages:,}",
        "searched by": ", ".join(kept.modes),
        "filters": ", ".join(kept.filter_fields) or "none",
        "corpus": kept.corpus_digest,
    }
    if kept.shard is not None:
        rows["shard"] = f"{kept.shard.number} of {kept.shard.of}, from passage {kept.shard.first:,}"
    if kept.encoder is not None and kept.dense is not None:
        encoder = kept.encoder
        rows["encoder"] = f"{encoder.model} ({encoder.convention}, {encoder.precision}, {encoder.dimension} numbers)"
        rows["encoder digest"] = encoder.digest
        rows["dense type"] = kept.dense.factory
        rows["kept vectors"] = kept.dense.vectors or "none"
        rows["memory"] = _format_memory(kept)
    for mode in kept.modes:
        rows[f"{mode} index"] = kept.compute_digest(mode)
    rows["on disk"] = f"{decimal(manifest.sum_bytes(kept.files))} in {len(kept.files)} files"
    rows["made with"] = ", ".join(f"{library} {version}" for library, version in kept.made_with.items())
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _format_memory(kept: Manifest) -> str:
    from forage_retriever.search import memory

    assert kept.dense is not None
    assert kept.encoder is not None
    needs = memory.estimate_needs(kept.dense.factory, kept.encoder.dimension, kept.passages)
    return f"{decimal(needs.held_bytes)} held, and {decimal(needs.mapped_bytes)} mapped from disk for full speed"
