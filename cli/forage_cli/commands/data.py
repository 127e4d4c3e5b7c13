"""`forage data`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from forage_cli.commands.options import Config, Overrides
from forage_runtime.text.console import TextConsole

app = typer.Typer(help="Make and look at data sets.", no_args_is_help=True)
_EXAMPLE_LENGTH = 300
"""Characters of a question in the terminal; the file of --json has it whole."""
Seed = Annotated[int, typer.Option(help="Seed of splits, samples and phrasings.", min=0)]


@app.command()
def world(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data/world"), seed: Seed = 0) -> None:
    """Make the built-in task: a corpus of world facts, with one- and two-hop questions split by entity."""
    from forage_cli.datasets.world.write import build_world

    console = TextConsole()
    with console.status("making the world facts …"):
        summary = build_world(out, seed)
    _print_summary(console, out, summary)


@app.command(name="knowledge-graph")
def knowledge_graph(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data/knowledge_graph"), seed: Seed = 0
) -> None:
    """Make the world facts as a knowledge graph: triples, and questions whose prompt explains the query tool."""
    from forage_cli.datasets.world.knowledge_graph import build_knowledge_graph

    console = TextConsole()
    with console.status("making the knowledge graph …"):
        summary = build_knowledge_graph(out, seed)
    _print_summary(console, out, summary)


@app.command()
def countdown(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data/countdown"),
    train: Annotated[int, typer.Option(help="Number of training problems.")] = 20_000,
    test: Annotated[int, typer.Option(help="Number of test problems.")] = 500,
    numbers: Annotated[str, typer.Option(help="Numbers per problem, 3 to 6, joined by commas.")] = "3,4",
    max_target: Annotated[int, typer.Option(help="Largest target.")] = 99,
    max_number: Annotated[int, typer.Option(help="Largest given number.")] = 99,
    seed: Annotated[int, typer.Option(help="Seed of numbers, operators and order.", min=0)] = 0,
) -> None:
    """Make countdown problems: write an equation of the given numbers that equals the target. All have a solution.

    Example:

      forage data countdown --train 20000 --numbers 3,4
    """
    from forage_cli.datasets.countdown import build_countdown
    from forage_runtime.errors import UserError

    try:
        sizes = [int(size) for size in numbers.split(",")]
    except ValueError:
        raise UserError(f"--numbers is {numbers!r}: give sizes joined by commas, for instance 3,4") from None
    console = TextConsole()
    with console.status("making the problems …"):
        summary = build_countdown(out, {"train": train, "test": test}, sizes, max_target, seed, max_number)
    _print_summary(console, out, summary)


def public(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="data/NAME")] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            help="SPLIT=FILE: use this JSONL or Parquet file instead of a download; repeat.", show_default=False
        ),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder that keeps downloads.")] = Path(".cache/questions"),
) -> None:
    """Convert a public question set from FlashRAG's layout to Search-R1's, from the Hugging Face Hub or from files.

    Examples:

      forage data nq

      forage data hotpotqa --file train=train.jsonl --file dev=dev.jsonl
    """
    from forage_cli.datasets.public_questions import convert_collection, fetch_collection

    source = str(context.info_name)
    console, folder = TextConsole(), out or Path("data") / source
    with console.status(f"making {source} …"):
        files = dict(map(_parse_split_file, file)) if file else fetch_collection(source, cache)
        summary = convert_collection(source, files, folder)
    _print_summary(console, folder, summary)


@app.command(short_help="Fetch Search-R1's Wikipedia of 2018 and its FAISS file.")
def wiki18(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data/wiki-18"),
    index: Annotated[str, typer.Option(help="Also the FAISS file over it: e5-flat.", show_default=False)] = "",
    sha256: Annotated[
        list[str] | None,
        typer.Option(help="FILE=DIGEST that a file of the Hub must have; repeat.", show_default=False),
    ] = None,
    source: Annotated[str, typer.Option(help="Folder or URL that has the Hub's files.", show_default="the Hub")] = "",
) -> None:
    """Fetch Search-R1's corpus, Wikipedia of December 2018 in 21 million passages, from the Hugging Face Hub.

    Writes corpus.jsonl; with --index the FAISS file, too. If it is interrupted, the same command goes on.

    Example:

      forage data wiki18 --index e5-flat
    """
    from forage_cli.commands.forwarded import run_in_service

    digests = [word for digest in sha256 or () for word in ("--sha256", digest)]
    chosen = {"--out": str(out), "--index": index, "--source": source}
    arguments = ["wiki18", *(word for option, value in chosen.items() if value for word in (option, value)), *digests]
    run_in_service("retriever", "forage_retriever.command", arguments)


@app.command(short_help="Which questions have their answer in the corpus, and in the retriever's best passages.")
def coverage(
    overrides: Overrides = None,
    config: Config = None,
    questions: Annotated[
        list[Path] | None,
        typer.Option("--questions", "-q", help="Parquet file of questions; repeat.", show_default="those of data"),
    ] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Passages a question.", show_default="retriever.topk")] = None,
    search: Annotated[bool, typer.Option("--search", help="Ask the retriever that is running, too.")] = False,
    examples: Annotated[int, typer.Option(min=0, help="Questions to show that the corpus cannot answer.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the counts to.", show_default=False)
    ] = None,
) -> None:
    """Count the questions whose accepted answer is in the corpus at all, and in the passages that a search finds.

    No policy learns to answer the others from what it reads: they bound every score. Case, punctuation and articles do
    not count, as in rewards; yes, no and single signs are left out. With --search the retriever, which must run
    ('forage up'), gets each question as it is.

    Examples:

      forage data coverage -c configs/demo.yaml

      forage data coverage -q data/nq/test.parquet data.corpus=data/wiki-18/corpus.jsonl --search --topk 3
    """
    import asyncio
    import json

    from forage_cli.datasets.coverage import (
        ALL,
        ask_retriever,
        build_table,
        find_answers,
        list_question_files,
        summarize,
    )
    from forage_cli.local.home import load_recipe
    from forage_cli.terminal.progress import show_progress
    from forage_records.questions import read_questions
    from forage_runtime.errors import DataError
    from forage_runtime.files.corpus import read_rows

    settings = load_recipe(config, overrides or [])
    console, depth = TextConsole(), topk or settings.retriever.topk
    files = questions or list_question_files(settings)
    if not files:
        raise DataError("there is no file of questions: name one by data.train_files, data.val_files or --questions")
    rows = read_questions(files).rows
    with show_progress(console, f"reading {settings.data.corpus}", None) as advance:
        passages = (str(fields["contents"]) for _, fields, _ in read_rows(settings.data.corpus))
        found = find_answers(rows, passages, advance)
    hits = None
    if search:
        with show_progress(console, f"asking {settings.retriever.http_address}", len(rows)) as advance:
            hits = asyncio.run(ask_retriever(settings, rows, depth, advance))
    parts = summarize(rows, found, hits, examples)
    console.print(build_table(parts, depth))
    for sentence in (sentence for name, part in parts.items() if name != ALL for sentence in part.missing):
        text = sentence if len(sentence) <= _EXAMPLE_LENGTH else f"{sentence[:_EXAMPLE_LENGTH]}…"
        console.print(f"not in the corpus: {text}", highlight=False, markup=False)
    if json_file is not None:
        figures = {name: part.to_json() for name, part in parts.items()}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _print_summary(console: TextConsole, folder: Path, summary: object) -> None:
    """Print what a data set has, a line for each fact; digests are whole in its manifest."""
    lines = [f"{folder}:", *(f"  {name}: {_describe(value)}" for name, value in vars(summary).items())]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _describe(value: object) -> str:
    """A count, the begin of a digest, or these by name."""
    if isinstance(value, Mapping):
        inner = (
            (key, f"({_describe(one)})" if isinstance(one, Mapping) else _describe(one)) for key, one in value.items()
        )
        return ", ".join(f"{key} {text}" for key, text in inner) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.12}"


def _parse_split_file(text: str) -> tuple[str, Path]:
    from forage_runtime.errors import UserError

    split, equals, path = text.partition("=")
    if not (split and equals and path):
        raise UserError(f"--file is {text!r}: give SPLIT=FILE, for instance train=train.jsonl")
    return split, Path(path)


for _source, _title in {
    "nq": "Natural Questions",
    "hotpotqa": "HotpotQA",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "2wikimultihopqa": "2WikiMultihopQA",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}.items():
    app.command(_source, short_help=f"Convert {_title} to the Search-R1 layout.")(public)
