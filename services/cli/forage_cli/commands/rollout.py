"""`forage rollout`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forage_cli.commands.options import BasePort, Config, Overrides, load_run_settings
from forage_cli.terminal.progress import show_progress

if TYPE_CHECKING:
    from forage_cli.runs.replay import Comparison
    from forage_common.files.trajectory_file import TrajectoryWriter
    from forage_common.settings import Settings
    from forage_common.v1.trajectory_pb2 import Trajectory

    Pair = tuple[Trajectory, Trajectory]

app = typer.Typer(help="Sample trajectories into a file, and replay such files.", no_args_is_help=True)
Limit = Annotated[int | None, typer.Option(min=1, help="Only so many.", show_default=False)]
_SCORES_IN_FLIGHT = 64


class Mode(StrEnum):
    RESCORE = "rescore"
    RERUN = "rerun"


@app.callback()
def _group() -> None:
    """Sample trajectories into a file, and replay such files."""


@app.command()
def sample(
    questions: Annotated[Path, typer.Argument(help="Parquet file in the Search-R1 layout.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write, or to go on with.")] = Path(
        "trajectories.parquet"
    ),
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Of every question.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0 instead of the settings'.")] = False,
    seed: Annotated[int, typer.Option(min=1, help="Of the first sample of the first question.")] = 1,
    limit: Limit = None,
    model: Annotated[
        Path | None, typer.Option(help="Policy folder, where services must be started.", show_default=False)
    ] = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Sample and score the answers to a file of questions; the whole trajectories go to a Parquet file.

    Uses the services that are running, or starts them. Ctrl-C keeps what was done; the same command goes on from there.
    """
    from forage_cli.local import serving
    from forage_cli.local.stack import SERVING
    from forage_common.clients import sampling
    from forage_common.files.model_folder import read_end_of_turn
    from forage_common.files.questions import read_questions
    from forage_common.files.trajectory_file import TrajectoryWriter, read_ids

    console = Console()
    settings = load_run_settings(config, overrides, base_port, "sample")
    prompts = sampling.build_prompts(read_questions([questions]).rows[:limit], settings, samples, greedy, seed)
    done = read_ids(out)
    left = [prompt for prompt in prompts if not sampling.trajectory_ids(prompt) <= done]
    with serving.ensure_services(settings, console, SERVING, model) as settings:
        end = read_end_of_turn(settings.model.path)
        with TrajectoryWriter(out, end, keep=True) as writer:
            asyncio.run(_write_groups(sampling.sample_groups(left, settings), writer, done, len(left), console))
    statuses = ", ".join(f"{count} {status}" for status, count in writer.statuses.most_common())
    console.print(f"{writer.statuses.total()} trajectories in {out}: {statuses}", highlight=False)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Trajectories, of 'forage rollout sample' or a replay.")],
    overrides: Overrides = None,
    rescore: Annotated[bool, typer.Option("--rescore", help="Judge the same texts by the settings' reward.")] = False,
    rerun: Annotated[bool, typer.Option("--rerun", help="Sample again: same prompts and seeds.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the new trajectories, or go on with it.")
    ] = None,
    limit: Limit = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Replay stored trajectories and compare: under another reward, or with the policy and retriever of today.

    Uses the services that are running, or starts what it needs with the settings' policy. Ctrl-C keeps what was done;
    with --out the same command goes on from there.
    """
    from forage_cli.local import serving
    from forage_cli.local.stack import SERVING, Program
    from forage_cli.runs.replay import Comparison
    from forage_cli.terminal import trajectories as show
    from forage_common.errors import UserError
    from forage_common.files.trajectory_file import TrajectoryWriter, read_header, read_ids

    if rescore == rerun:
        raise UserError("say what to do with the trajectories: --rescore or --rerun, one of both")
    mode = Mode.RESCORE if rescore else Mode.RERUN
    console = Console()
    settings = load_run_settings(config, overrides, base_port, "replay")
    stored = read_header(file)
    done = read_ids(out) if out else set()
    chosen = _select_trajectories(file, done, limit, mode)
    comparison = Comparison()
    total = max(0, min(stored.rows, limit or stored.rows) - len(done))
    with (
        serving.ensure_services(settings, console, (Program.REWARD,) if rescore else SERVING) as settings,
        TrajectoryWriter(out, stored.end_of_turn, keep=True) if out else nullcontext() as writer,
    ):
        try:
            work = _replay_trajectories(mode, chosen, settings, stored.end_of_turn)
            asyncio.run(_collect_comparison(work, comparison, writer, total, console))
        finally:
            if comparison.total:
                console.print(show.render_comparison(comparison, rerun))
    if writer is not None:
        console.print(f"{writer.statuses.total()} trajectories in {out}", highlight=False)
    if rescore and comparison.total < total:
        console.print(f"{total - comparison.total} never reached a reward and were left out", highlight=False)


def _select_trajectories(file: Path, done: set[str], limit: int | None, mode: Mode) -> Iterable[Trajectory]:
    from itertools import islice

    from forage_cli.runs.replay import is_scored
    from forage_common.files.trajectory_file import read_trajectories

    for trajectory in islice(read_trajectories(file), limit):
        if trajectory.id not in done and (mode is Mode.RERUN or is_scored(trajectory)):
            yield trajectory


async def _replay_trajectories(
    mode: Mode, chosen: Iterable[Trajectory], settings: Settings, end_of_turn: str
) -> AsyncGenerator[Pair, None]:
    from forage_cli.runs.replay import make_rerun, make_rescore
    from forage_common.clients.concurrency import map_concurrently
    from forage_common.clients.reward import RewardClient
    from forage_common.clients.rollout import RolloutClient

    if mode is Mode.RESCORE:
        work = map_concurrently(chosen, make_rescore(RewardClient(settings), end_of_turn), _SCORES_IN_FLIGHT)
        async with aclosing(work):
            async for pair in work:
                yield pair
        return
    async with RolloutClient(settings) as rollout:
        in_flight = settings.rollout.max_groups_in_flight
        async with aclosing(map_concurrently(chosen, make_rerun(rollout, settings.run.id), in_flight)) as work:
            async for pair in work:
                yield pair


async def _collect_comparison(
    work: AsyncGenerator[Pair, None],
    comparison: Comparison,
    writer: TrajectoryWriter | None,
    total: int,
    console: Console,
) -> None:
    with show_progress(console, "replayed", total) as advance:
        async with aclosing(work):
            async for stored, new in work:
                comparison.add(stored, new)
                if writer is not None:
                    writer.write(new)
                advance()


async def _write_groups(
    groups: AsyncGenerator[list[Trajectory], None],
    writer: TrajectoryWriter,
    done: set[str],
    total: int,
    console: Console,
) -> None:
    with show_progress(console, "questions", total) as advance:
        async with aclosing(groups):
            async for trajectories in groups:
                for trajectory in trajectories:
                    if trajectory.id not in done:
                        writer.write(trajectory)
                advance()
