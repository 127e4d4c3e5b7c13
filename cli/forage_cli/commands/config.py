"""`forage config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from forage_cli.commands.options import Config, Overrides
from forage_runtime.text.console import TextConsole
from forage_runtime.text.redaction import redact_settings
from forage_runtime.text.terminal import echo

if TYPE_CHECKING:
    from forage_cli.settings_reference import SettingDescription
    from forage_runtime.settings import Settings

app = typer.Typer(help="Show, explain and check settings.", no_args_is_help=True)


@app.command()
def show(
    overrides: Overrides = None,
    config: Config = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="With type, unit, default and description of every setting.")
    ] = False,
) -> None:
    """Print the resolved settings: file, then environment (FORAGE__RUN__SEED=1), then arguments.

    Examples:

      forage config show --config configs/demo.yaml trainer.total_training_steps=50

      forage config show --explain
    """
    from forage_cli.local.home import load_recipe

    console = TextConsole()
    settings = load_recipe(config, overrides or [])
    if explain:
        from forage_cli.settings_reference import describe_settings

        _print_explained(describe_settings(), settings, console)
        return
    text = settings.to_yaml(redacted=True)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        echo(text.removesuffix("\n"))


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A setting or a section, for instance trainer.max_staleness or trainer.")],
    overrides: Overrides = None,
    config: Config = None,
) -> None:
    """Print type, unit, default, description and current value of a setting, or of every setting of a section.

    Examples:

      forage config explain trainer.max_staleness

      forage config explain rollout.engine --config configs/demo.yaml
    """
    from forage_cli.local.home import load_recipe
    from forage_cli.settings_reference import explain_setting

    settings = load_recipe(config, overrides or [])
    _print_explained(explain_setting(key), settings, TextConsole())


@app.command()
def check(overrides: Overrides = None, config: Config = None) -> None:
    """Check the settings and every file they name, without starting anything.

    Each service makes the checks of its start, in its own environment: lengths, batch sizes, devices, rewards,
    environments, index, encoder, trackers, tokens and certificates. Corpus and questions are read as the retriever and
    the trainer read them. Prints every problem at once, a line each, and what of the chat template matters to the run.
    Prints the memory that the recipe needs in Redis. If the server runs, warns where it gives less, or can lose writes,
    and where the run's rollout service gives a data source another environment. Prints what the retriever answers on
    this machine, and warns where that is less than the run's trajectories ask, where the recipe does not fit GPUs that
    are here (`forage plan`), or where fewer than half of a sample of questions have their answer in the corpus
    (`forage data coverage`).

    Example:

      forage config check --config configs/demo.yaml
    """
    from forage_cli.datasets.coverage import find_uncovered
    from forage_cli.local.environments import find_environment_problems
    from forage_cli.local.gpus import find_plan_problems
    from forage_cli.local.home import load_recipe
    from forage_cli.local.preflight import check_settings, print_remarks
    from forage_cli.local.redis.memory import check_redis
    from forage_cli.planning.retrieval.here import describe_searches, estimate_searches
    from forage_cli.planning.streams import estimate_stream_memory

    settings = load_recipe(config, overrides or [])
    remarks = check_settings(settings)
    typer.echo("the settings are valid, and the files they name can be used")
    print_remarks(remarks)
    typer.echo(f"Redis: {estimate_stream_memory(settings)}")
    searches = estimate_searches(settings)
    if searches is not None:
        typer.echo(f"searches: {describe_searches(searches)}")
    warnings = (*check_redis(settings), *find_environment_problems(settings), *find_plan_problems(settings))
    print_remarks(f"warning: {problem}" for problem in (*warnings, *find_uncovered(settings)))


@app.command("from-verl")
def from_verl(
    file: Annotated[Path, typer.Argument(help="Script with verl's command line, or YAML file.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; without it the settings are printed.")
    ] = None,
) -> None:
    """Translate the settings of verl or Search-R1 into a settings file.

    Takes the command line of a script (`python3 -m verl.trainer.main_ppo key=value …`), with the variables that the
    script sets, also in a here-document, or a YAML file. Of several such commands the last is taken. Nothing is run.
    What has no place in Forage, depends on what the file does not say, or is not read, is a comment with the reason.

    Example:

      forage config from-verl train_grpo.sh -o my.yaml
    """
    from forage_cli.migration.translate import translate
    from forage_cli.migration.verl_file import read_verl_file
    from forage_runtime.errors import UserError

    text = translate(read_verl_file(file), file.name)
    if out is None:
        echo(text.removesuffix("\n"))
        return
    if out.exists():
        raise UserError(f"{out} is there already: name another file")
    out.write_text(text, encoding="utf-8")
    echo(f"{out}: say in it what its first lines name, then run 'forage config check -c {out}'")


def _print_explained(descriptions: list[SettingDescription], settings: Settings, console: Console) -> None:
    values = redact_settings(settings.model_dump(mode="json"))
    for setting in descriptions:
        console.print(f"{setting.name} = {_format_value(values, setting)}", style="bold", highlight=False, markup=False)
        text = "\n".join(filter(None, (setting.summary, setting.description)))
        console.print(Padding(Text(text), (0, 0, 1, 2)))


def _format_value(values: Any, setting: SettingDescription) -> str:
    """The current value as YAML on one line; "–" where the key of a map, or the item of a list, is not known."""
    for part in setting.name.split("."):
        if not isinstance(values, dict) or part not in values:
            return "–"
        values = values[part]
    return str(yaml.safe_dump(values, default_flow_style=True, width=1000)).removesuffix("...\n").strip()
