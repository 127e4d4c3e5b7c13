"""`forage rollout`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forage_cli.commands.options import BasePort, Config, Overrides, load_run_settings
from forage_cli.terminal.progress import consume_results
from forage_runtime.text.console import TextConsole

if TYPE_CHECKING:
    from forage_proto.v1.trajectory_pb2 import Trajectory
    from forage_runtime.settings import Settings

    Pair = tuple[Trajectory, Trajectory]

app = typer.Typer(help="Sample trajectories into a file, and replay stored ones.", no_args_is_help=True)
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first so many.", show_default=False)]
_SCORES_IN_FLIGHT = 64


@app.command()
def sample(
    questions: Annotated[Path, typer.Argument(help="Parquet file in the Search-R1 layout.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write or to continue.")] = Path(
        "trajectories.parquet"
    ),
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples per question.")] = 1,
    seed: Annotated[int, typer.Option(min=1, help="Seed of the first sample of the first question.")] = 1,
    limit: Limit = None,
    model: Annotated[Path | None, typer.Option(help="Model folder to start services for.", show_default=False)] = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Sample and score trajectories for a file of questions, and write them to a Parquet file.

    Uses running services, or starts them. After Ctrl-C the same command continues; finished trajectories are kept.

    Example:

      forage rollout sample data/world/test.parquet --limit 100 --samples 4 --out trajectories.parquet
    """
    from forage_cli.datasets.question_file import read_and_warn
    from forage_cli.local import serving
    from forage_cli.local.stack import SERVING
    from forage_records import sampling
    from forage_records.trajectory_file import TrajectoryWriter, read_ids
    from forage_runtime.files.model_folder import read_end_of_turn

    console = TextConsole()
    settings = load_run_settings(config, overrides, base_port, "sample")
    prompts = sampling.build_prompts(read_and_warn([questions]).rows[:limit], settings, samples, False, seed)
    done = read_ids(out)
    left = [prompt for prompt in prompts if not sampling.trajectory_ids(prompt) <= done]
    with serving.ensure_services(settings, console, SERVING, model) as settings:
        end = read_end_of_turn(settings.model.path)
        with TrajectoryWriter(out, end, keep=True) as writer:

            def keep(group: list[Trajectory]) -> None:
                for trajectory in group:
                    if trajectory.id not in done:
                        writer.write(trajectory)

            groups = sampling.sample_groups(left, settings)
            asyncio.run(consume_results(groups, keep, console, "questions", len(left)))
    statuses = ", ".join(f"{count} {status}" for status, count in writer.statuses.most_common())
    console.print(f"{writer.statuses.total()} trajectories in {out}: {statuses}", highlight=False)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Trajectories written by 'forage rollout sample' or by a replay.")],
    overrides: Overrides = None,
    rescore: Annotated[
        bool, typer.Option("--rescore", help="Score the same texts with the reward of the settings.")
    ] = False,
    rerun: Annotated[bool, typer.Option("--rerun", help="Sample again with the same prompts and seeds.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write the new trajectories to, or to continue.")
    ] = None,
    limit: Limit = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Replay stored trajectories and compare: with another reward, or with another policy or retriever.

    --rerun uses running services, or starts them with the policy of the settings; --rescore starts a reward service of
    its own, unless --config or a setting says where one is. With --out the same command continues after Ctrl-C.

    Examples:

      forage rollout replay trajectories.parquet --rescore reward.routes.nq.name=em

      forage rollout replay trajectories.parquet --rerun --out again.parquet
    """
    from forage_cli.local import serving
    from forage_cli.local.running import names_address
    from forage_cli.local.stack import SERVING, Program
    from forage_cli.terminal import trajectories as show
    from forage_records.replay import Comparison
    from forage_records.trajectory_file import TrajectoryWriter, read_header, read_ids
    from forage_runtime.errors import UserError

    if rescore == rerun:
        raise UserError("give one of --rescore and --rerun")
    console = TextConsole()
    is_reward_own = rescore and config is None and not names_address(overrides or [])
    program = None if is_reward_own else Program.REWARD if rescore else Program.ROLLOUT
    settings = load_run_settings(config, overrides, base_port, "replay", program)
    if is_reward_own:
        settings = serving.move_reward(settings)
    stored = read_header(file)
    done = read_ids(out) if out else set()
    chosen = _select_trajectories(file, done, limit, rescore)
    comparison = Comparison()
    total = max(0, min(stored.rows, limit or stored.rows) - len(done))
    with (
        serving.ensure_services(settings, console, (Program.REWARD,) if rescore else SERVING) as settings,
        TrajectoryWriter(out, stored.end_of_turn, keep=True) if out else nullcontext() as writer,
    ):

        def keep(pair: Pair) -> None:
            comparison.add(*pair)
            if writer is not None:
                writer.write(pair[1])

        try:
            pairs = _replay_trajectories(rescore, chosen, settings, stored.end_of_turn)
            asyncio.run(consume_results(pairs, keep, console, "replayed", total))
        finally:
            if comparison.total:
                console.print(show.render_comparison(comparison, rerun))
    if writer is not None:
        console.print(f"{writer.statuses.total()} trajectories in {out}", highlight=False)
    if rescore and comparison.total < total:
        console.print(f"{total - comparison.total} were never scored and are left out", highlight=False)


def _select_trajectories(file: Path, done: set[str], limit: int | None, rescore: bool) -> Iterable[Trajectory]:
    from itertools import islice

    from forage_records.replay import is_scored
    from forage_records.trajectory_file import read_trajectories

    for trajectory in islice(read_trajectories(file), limit):
        if trajectory.id not in done and (not rescore or is_scored(trajectory)):
            yield trajectory


async def _replay_trajectories(
    rescore: bool, chosen: Iterable[Trajectory], settings: Settings, end_of_turn: str
) -> AsyncGenerator[Pair, None]:
    from forage_records.replay import make_rerun, make_rescore
    from forage_runtime.clients.concurrency import map_concurrently
    from forage_runtime.clients.reward import RewardClient
    from forage_runtime.clients.rollout import RolloutClient

    async with AsyncExitStack() as stack:
        if rescore:
            replay, in_flight = make_rescore(RewardClient(settings), end_of_turn), _SCORES_IN_FLIGHT
        else:
            rollout = await stack.enter_async_context(RolloutClient(settings))
            replay, in_flight = make_rerun(rollout, settings.run.id), settings.rollout.max_groups_in_flight
        pairs = map_concurrently(chosen, replay, in_flight)
        await stack.enter_async_context(aclosing(pairs))
        async for pair in pairs:
            yield pair
