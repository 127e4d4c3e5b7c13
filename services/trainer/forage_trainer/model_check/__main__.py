"""`forage model check`: one page about a model's chat template, tokenizer and rows."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from forage_runtime.command import run_command
from forage_runtime.errors import DataError
from forage_runtime.files.model_folder import list_weight_files
from forage_runtime.files.template_values import keep_template_date
from forage_runtime.settings import Settings, load_settings
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.text.chat_template import ChatTemplate, TemplateError
from forage_runtime.text.console import TextConsole
from forage_runtime.text.terminal import printable
from forage_trainer.chats.chat_tokenizer import load_tokenizer
from forage_trainer.chats.template_facts import Fact, Level, TemplateProbe
from forage_trainer.weights.completeness import find_incomplete

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
_LARGEST = 2 * 2**30
_STYLES = {Level.FINE: "green", Level.NOTE: "cyan", Level.WARNING: "bold yellow"}


@app.command()
def check(
    folder: Annotated[Path | None, typer.Argument(help="Model folder; else model.path.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, key=value.", metavar="[key=value]…", show_default=False)
    ] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="Chat template instead of the folder's.", show_default=False)
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Settings file.", show_default=False)] = None,
    rows: Annotated[
        bool | None,
        typer.Option("--rows/--no-rows", help="Compare rows with a forward pass; default: of weights up to 2 GiB."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a model's chat template and tokenizer do to training, what Forage does about it, and what to set.

    Exit code 1 where something needs a setting.

    Examples:

      forage model check models/tiny-policy

      forage model check ~/models/Qwen3.5-4B data.apply_chat_template_kwargs='{enable_thinking: false}'
    """
    given = list(overrides or [])
    if folder is not None and "=" in folder.name and not folder.exists():
        given, folder = [str(folder), *given], None
    settings = keep_template_date(load_settings(config, given))
    facts = list_facts(folder or settings.model.path, settings, template, rows)
    if as_json:
        typer.echo(json.dumps([vars(fact) for fact in facts], indent=2, ensure_ascii=False))
    else:
        print_facts(folder or settings.model.path, facts)
    if any(fact.level is Level.WARNING for fact in facts):
        raise typer.Exit(1)


def list_facts(folder: Path, settings: Settings, template: Path | None = None, rows: bool | None = None) -> list[Fact]:
    """List the facts about a model folder.

    Raises:
        DataError: the folder has no tokenizer or template, or the template does not render a plain question.
    """
    tokenizer = load_tokenizer(folder)
    if template is not None:
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"--template {template} cannot be read ({error})") from None
    own = ChatTemplate(tokenizer)
    today = settings.data.template_date
    assert today is not None, "the caller has set it"
    probe = TemplateProbe(own, settings.data.apply_chat_template_kwargs, today)
    try:
        facts = probe.list_facts()
    except TemplateError as error:
        raise DataError(f"the chat template of {template or folder} does not render a question ({error})") from None
    from forage_trainer.model_check.token_facts import check_rows, check_tokenizer

    prompt = probe.rendered.text
    facts += check_tokenizer(tokenizer, prompt)
    incomplete = find_incomplete(folder)
    if incomplete:
        remedy = "give a complete folder: the trainer refuses this one"
        facts.append(Fact("weights", incomplete, "", remedy, Level.WARNING))
        rows = False
    else:
        facts.append(Fact("weights", "every tensor of the model is there"))
    if rows is None:
        try:
            rows = sum((folder / name).stat().st_size for name in list_weight_files(folder)) <= _LARGEST
        except (OSError, ValueError):
            rows = False
    if rows:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="float32", local_files_only=True).eval()
        facts.append(check_rows(tokenizer, model, prompt))
    else:
        facts.append(Fact("rows", "not compared with a forward pass", "", "--rows does it", Level.NOTE))
    return facts


def print_facts(folder: Path, facts: list[Fact]) -> None:
    """Print a page."""
    table = Table(
        title=f"{folder}", title_justify="left", show_lines=False, box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name in ("", "what", "seen", "what Forage does", "what you should set"):
        table.add_column(name, overflow="fold")
    for fact in facts:
        texts = [Text(printable(text)) for text in (fact.topic, fact.seen, fact.done, fact.remedy)]
        table.add_row(Text(fact.level, style=_STYLES[fact.level]), *texts)
    console = TextConsole()
    console.print(table)
    count = sum(fact.level is Level.WARNING for fact in facts)
    console.print(f"{count} of {len(facts)} need a setting" if count else f"{len(facts)} facts, none needs a setting")


def main() -> None:
    """Entry point of `python -m forage_trainer.model_check`: a user's error is one sentence and exit code 2."""
    configure_logs("trainer", "WARNING")
    # The page has everything that matters: no bars, and no word on how torch's own tracing is called.
    os.environ["TQDM_DISABLE"] = "1"
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    run_command(app, "forage model check")


if __name__ == "__main__":
    main()
