"""`forage index`: builds, inspects, verifies, measures, tunes and converts indexes, in the retriever's environment."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from forage_retriever.index import manifest
from forage_retriever.index.build import build_index
from forage_retriever.index.building.shards import Processes
from forage_retriever.index.building.stages import hash_source
from forage_retriever.index.manifest import DamagedError, Manifest, Vectors
from forage_retriever.index.progress import open_report
from forage_retriever.index.recipe import Recipe, load_encoder
from forage_runtime.command import run_command
from forage_runtime.errors import SettingsError
from forage_runtime.settings import RetrievalMode, Settings, load_settings
from forage_runtime.text.console import TextConsole

_ALL_BYTES = sys.maxsize

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
StoredVectors = Annotated[
    str,
    typer.Option("--vectors", help="Store vectors: none, float16, float32; auto = where exact scores help this type."),
]
Shards = Annotated[int, typer.Option(help="Cut the corpus into so many indexes.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")]
Jobs = Annotated[
    int, typer.Option(help="Shards to build at once; 0 = as many as CPUs and memory allow.", min=0, show_default=False)
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
    out: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    overrides: Overrides = None,
    corpus: Corpus = None,
    mode: Mode = None,
    faiss_factory: Factory = "",
    filter_field: Fields = None,
    vectors: StoredVectors = "auto",
    shards: Shards = 1,
    jobs: Jobs = 0,
    config: Config = None,
) -> None:
    """Build an index folder. If it is killed, the same command resumes."""
    settings = _load_settings(config, overrides, corpus=corpus, mode=mode, factory=faiss_factory, fields=filter_field)
    encoder = load_encoder(settings.retriever, building=True)
    recipe = Recipe.from_settings(settings.retriever, encoder, _parse_vectors(vectors))
    with open_report() as report:
        source = hash_source(settings.data.corpus, report)
        _check_target(out, recipe.compute_digest(source, shards))
        processes = Processes(jobs, settings.retriever)
        build_index(out, _staging_dir(out), settings.data.corpus, recipe, report, shards, processes, source)
    _print_index(out)


@app.command(
    epilog="""[bold]Examples[/]

    forage index convert wiki wiki-small --faiss-factory IVF4096,SQ8

    forage index convert wiki --faiss e5_Flat.index --corpus wiki-18.jsonl retriever.encoder.model=models/e5-base-v2

    forage index convert wiki --faiss e5_Flat.index --corpus wiki-18.jsonl --shards 4"""
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
    vectors: StoredVectors = "auto",
    shards: Shards = 1,
    jobs: Jobs = 0,
    config: Config = None,
) -> None:
    """Convert an index to another type without encoding again, or adopt a FAISS file with its corpus."""
    paths = [Path(word) for word in folders if "=" not in word]
    overrides = [word for word in folders if "=" in word]
    settings = _load_settings(config, overrides, corpus=corpus, mode=mode, factory=faiss_factory, fields=filter_field)
    if len(paths) != (2 if faiss is None else 1):
        raise SettingsError("convert takes OLD NEW --faiss-factory TYPE, or NEW --faiss FILE --corpus FILE")
    new = paths[-1]
    if new.exists():
        raise SettingsError(f"{new} is there already: give a new folder")
    with open_report() as report:
        if faiss is None:
            if shards > 1:
                raise SettingsError("--shards cuts the file of --faiss: give it, or use `forage index build`")
            from forage_retriever.index.convert import convert_index

            recipe = Recipe.from_settings(settings.retriever, None, _parse_vectors(vectors))
            convert_index(paths[0], new, _staging_dir(new), recipe, report)
        else:
            from forage_retriever.index.adopt import adopt_index

            if settings.retriever.mode is RetrievalMode.BM25:
                raise SettingsError("--mode bm25 has no use for --faiss: use `forage index build`")
            recipe = Recipe.from_settings(settings.retriever, load_encoder(settings.retriever, building=False))
            processes = Processes(jobs, settings.retriever)
            adopt_index(new, _staging_dir(new), faiss, settings.data.corpus, recipe, report, shards, processes)
    _print_index(new)


@app.command()
def inspect(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False
) -> None:
    """Show the content, origin and memory needs of an index."""
    for one in _list_indexes(folder):
        if as_json:
            typer.echo(manifest.read_manifest(one).model_dump_json(indent=1))
        else:
            _print_index(one)


@app.command()
def verify(folder: Folder) -> None:
    """Check every file against the manifest. Exit code 1: a file is damaged."""
    console = TextConsole(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    for one in _list_indexes(folder):
        try:
            description = manifest.read_manifest(one)
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                task = progress.add_task("checking", total=manifest.sum_bytes(description.files))
                manifest.check_files(one, description, partial(progress.advance, task), _ALL_BYTES)
        except DamagedError as error:
            console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        typer.echo(f"{one}: all {len(description.files)} files are as they were built")


@app.command(
    epilog="""[bold]Examples[/]

    forage index pull s3://bucket/indexes/wiki indexes/wiki

    forage index pull hf://datasets/OWNER/NAME indexes/wiki --sha256 6f1e…"""
)
def pull(
    url: Annotated[
        str, typer.Argument(help="Folder of an index: a path, http(s)://, s3://, gs:// or hf://.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    sha256: Annotated[str, typer.Option(help="SHA-256 of its manifest.json.", show_default=False)] = "",
) -> None:
    """Copy an index from an address, checked against its manifest. If it is interrupted, the same command goes on."""
    from forage_retriever.index.pull import pull_index

    with open_report() as report:
        pulled = pull_index(url, out, out.absolute().parent / f".{out.name}.pulling", report, sha256)
    if not pulled:
        raise SettingsError(f"{out} is there already: check it with `forage index verify {out}`, or give a new folder")
    _print_index(out)


@app.command(epilog="[bold]Example[/]: forage index push indexes/wiki s3://bucket/indexes/wiki")
def push(
    folder: Folder,
    url: Annotated[str, typer.Argument(help="Folder to write: a path, s3:// or gs://.", show_default=False)],
) -> None:
    """Copy an index to an address; its manifest last, so that nobody pulls half of it."""
    from forage_retriever.index.pull import push_index

    with open_report() as report:
        push_index(folder, url, report)
    typer.echo(f"{folder} is at {url}")


@app.command(hidden=True)
def wiki18(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data/wiki-18"),
    index: Annotated[str, typer.Option(help="Also its FAISS file: e5-flat.", show_default=False)] = "",
    sha256: Annotated[
        list[str] | None, typer.Option(help="FILE=DIGEST that a file must have; repeat.", show_default=False)
    ] = None,
    source: Annotated[str, typer.Option(help="Folder or URL that has the Hub's files.", show_default="the Hub")] = "",
) -> None:
    """Fetch Search-R1's Wikipedia of 2018, 21 million passages: what `forage data wiki18` runs."""
    from forage_retriever.command.wiki18 import fetch_wiki18

    with open_report() as report:
        sentences = fetch_wiki18(out, index, sha256 or [], report, source)
    for sentence in sentences:
        typer.echo(sentence)


@app.command(
    "eval",
    epilog="[bold]Example[/]: forage index eval wiki questions.jsonl --sweep --out report",
)
def evaluate(
    folder: Folder,
    questions: Annotated[Path, typer.Argument(help="JSONL: question, gold_ids.", show_default=False)],
    overrides: Overrides = None,
    sweep: Annotated[bool, typer.Option(help="Also measure over ef_search, nprobe and refine.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the figures and a plot.", show_default=False)] = None,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Measure recall and hits by mode on questions with known passages."""
    from forage_retriever.command.evaluate import evaluate_index

    evaluate_index(folder, questions, load_settings(config, overrides or []).retriever, out, sweep, as_json)


@app.command(epilog="[bold]Example[/]: forage index tune wiki questions.jsonl --out tuned.yaml")
def tune(
    folder: Folder,
    questions: Annotated[Path, typer.Argument(help="JSONL: question, gold_ids.", show_default=False)],
    overrides: Overrides = None,
    recall: Annotated[
        float | None,
        typer.Option(
            help="Share of the exact ten nearest that the vector search must find.",
            min=0.01,
            max=1,
            show_default="as now, at least 0.95",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the settings (YAML).", show_default=False)] = None,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Choose weights of hybrid search, nprobe, ef_search and refine by half of the questions; the others judge."""
    from forage_retriever.command.tune import tune_index

    tune_index(folder, questions, load_settings(config, overrides or []).retriever, recall, out, as_json)


@app.command(epilog="[bold]Example[/]: forage index bench wiki --seconds 10 retriever.threads=4")
def bench(
    folder: Folder,
    overrides: Overrides = None,
    questions: Annotated[Path | None, typer.Option(help="JSONL: question.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(help="For each batch size.", min=0.1)] = 5.0,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Measure queries per second and their latency, in this process."""
    from forage_retriever.command.bench import benchmark_index

    benchmark_index(folder, load_settings(config, overrides or []).retriever, seconds, questions, as_json)


def main() -> None:
    """Entry point of `python -m forage_retriever.command`: a user error is one sentence and exit code 2."""
    run_command(app, "forage index")


def _load_settings(
    config: Path | None,
    overrides: list[str] | None,
    corpus: Path | None,
    mode: RetrievalMode | None,
    factory: str,
    fields: list[str] | None,
) -> Settings:
    """Load the settings; options are short for settings, and override them."""
    assignments = list(overrides or [])
    if corpus is not None:
        assignments.append(f"data.corpus={corpus}")
    if mode is not None:
        assignments.append(f"retriever.mode={mode}")
    if factory:
        assignments.append(f"retriever.faiss_factory={factory}")
    settings = load_settings(config, assignments)
    if fields:
        retriever = settings.retriever.model_copy(update={"filter_fields": tuple(fields)})
        settings = settings.model_copy(update={"retriever": retriever})
    return settings


def _parse_vectors(choice: str) -> Vectors | None:
    choices: dict[str, Vectors | None] = {"auto": None, "none": "", "float16": "float16", "float32": "float32"}
    if choice not in choices:
        raise SettingsError(f"--vectors is {choice!r}: give {', '.join(choices)}")
    return choices[choice]


def _staging_dir(out: Path) -> Path:
    return out.absolute().parent / f".{out.name}.building"


def _check_target(out: Path, recipe: str) -> None:
    """Check that the target folder is missing, empty, or already this index."""
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if not out.exists():
        return
    recipes = {manifest.read_manifest(folder).recipe for folder in _list_indexes(out)}
    if recipes != {recipe}:
        raise SettingsError(f"{out} is there already and is another index: give a new folder, or delete it")


def _list_indexes(folder: Path) -> list[Path]:
    return manifest.list_shards(folder) or [folder]


def _print_index(folder: Path) -> None:
    for one in _list_indexes(folder):
        TextConsole(soft_wrap=True).print(_index_table(one, manifest.read_manifest(one)), markup=False)


def _index_table(folder: Path, description: Manifest) -> Table:
    table = Table(Column(), Column(overflow="fold"), title=str(folder), show_header=False, title_justify="left")
    rows = {
        "passages": f"{description.passages:,}",
        "searched by": ", ".join(description.modes),
        "filters": ", ".join(description.filter_fields) or "none",
        "corpus": description.corpus_digest,
    }
    if description.shard is not None:
        rows["shard"] = (
            f"{description.shard.number} of {description.shard.of}, from passage {description.shard.first:,}"
        )
    if description.encoder is not None and description.dense is not None:
        encoder = description.encoder
        rows["encoder"] = f"{encoder.model} ({encoder.convention}, {encoder.precision}, {encoder.dimension} numbers)"
        rows["encoder digest"] = encoder.digest
        rows["dense type"] = description.dense.factory
        rows["stored vectors"] = description.dense.vectors or "none"
        rows["memory"] = _format_memory(description)
    for mode in description.modes:
        rows[f"{mode} index"] = description.compute_digest(mode)
    rows["on disk"] = f"{decimal(manifest.sum_bytes(description.files))} in {len(description.files)} files"
    rows["built with"] = ", ".join(f"{library} {version}" for library, version in description.made_with.items())
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _format_memory(description: Manifest) -> str:
    from forage_retriever.search import memory

    assert description.dense is not None
    assert description.encoder is not None
    needs = memory.estimate_needs(description.dense.factory, description.encoder.dimension, description.passages)
    return f"{decimal(needs.held_bytes)} held, and {decimal(needs.mapped_bytes)} mapped from disk for full speed"
