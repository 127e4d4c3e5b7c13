"""`forage probe`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forage_cli.commands.options import BasePort, Config, load_run_settings
from forage_cli.terminal.progress import consume_results
from forage_runtime.text.console import TextConsole

if TYPE_CHECKING:
    from forage_cli.probe.folder import ProbeFolder
    from forage_probe.prober import ProbePlan
    from forage_proto.v1.probe_pb2 import Probed
    from forage_proto.v1.trajectory_pb2 import Trajectory
    from forage_runtime.settings import Settings

    Serve = Callable[[], Settings]


def probe(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRAJECTORIES.parquet] [SETTINGS]...",
            help="A file of trajectories, and settings such as reward.routes.nq.name=em.",
            show_default=False,
        ),
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="Sample fresh trajectories for these questions instead.", show_default=False)
    ] = None,
    points: Annotated[int, typer.Option(min=1, help="Truncations of each thought, beside the empty one.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Answers sampled at each truncation.")] = 50,
    seed: Annotated[int, typer.Option(min=1, help="Seed of all samples.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Probe only the first so many trajectories.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write or to continue.", show_default="NAME-probe")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the results of other probes in the folder.")] = False,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy to start services for: a model folder, RUN@latest, RUN@best, RUN@7, http://…/v1."),
    ] = None,
    config: Config = None,
    base_port: BasePort = None,
) -> None:
    """Probe whether answers depend on thoughts: truncate thoughts, sample answers, measure how often they are right.

    Uses running services, or starts them. After Ctrl-C or a crash the same command continues; finished probes are kept.
    Prints a table and writes a report page.

    Examples:

      forage probe trajectories.parquet --limit 20

      forage probe --questions data/world/test.parquet --limit 20 --policy runs/latest@best
    """
    from forage_cli.evaluation.engines import check_policies, identify_running, start_engine
    from forage_cli.evaluation.policies import RUNNING, resolve_policy
    from forage_cli.probe import report, show
    from forage_cli.probe.folder import ProbeFolder, hash_file
    from forage_probe.prober import ProbePlan
    from forage_records.trajectory_file import read_header, read_trajectories
    from forage_runtime.errors import UserError

    console = TextConsole()
    files, overrides = _split_arguments(arguments or [])
    if len(files) + (questions is not None) != 1:
        raise UserError("name one file of trajectories, or --questions FILE")
    source = questions or files[0]
    settings = load_run_settings(config, overrides, base_port, "probe")
    served = resolve_policy(policy or RUNNING)
    if policy is not None:
        check_policies([served], settings)
        model = settings.model.model_copy(update={"path": served.folder or settings.model.path})
        settings = settings.model_copy(update={"model": model})
    plan = ProbePlan(points, samples, seed)
    described = {"source": hash_file(source), "questions": questions is not None, **asdict(plan)}
    if questions is None:
        read_header(source)  # an unreadable file is refused before anything is written or started
    folder = ProbeFolder(out or Path(f"{source.stem}-probe"), described, fresh)
    with ExitStack() as started:

        @cache
        def serve() -> Settings:
            running = started.enter_context(start_engine([served], settings, console))
            folder.agree(policy=asyncio.run(identify_running(served, running)).digest)
            return running

        if questions is not None:
            source = _sample_missing(questions, limit, seed, folder, settings, serve, console)
        probes = _probe_missing(source, limit, plan, folder, serve, console)
    summary = folder.finish(probes)
    folder.report.write_text(report.render_page(summary, probes, read_trajectories(source), settings), encoding="utf-8")
    console.print(show.render_summary(summary))
    console.print(f"{len(probes)} probes in {folder.path}; report {folder.report}", highlight=False)


def _split_arguments(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Separate files from settings ("key=value")."""
    return [Path(a) for a in arguments if "=" not in a], [a for a in arguments if "=" in a]


def _sample_missing(
    questions: Path,
    limit: int | None,
    seed: int,
    folder: ProbeFolder,
    settings: Settings,
    serve: Serve,
    console: Console,
) -> Path:
    """Sample the trajectories that the folder lacks; returns the file with one trajectory per question."""
    from forage_cli.datasets.question_file import read_and_warn
    from forage_records import sampling
    from forage_records.trajectory_file import TrajectoryWriter
    from forage_runtime.files.model_folder import read_end_of_turn

    prompts = sampling.build_prompts(read_and_warn([questions]).rows[:limit], settings, 1, False, seed)
    with folder.sampled() as journal:
        known = {trajectory.id for trajectory in journal.read()}
        left = [prompt for prompt in prompts if not sampling.trajectory_ids(prompt) <= known]
        if left:

            def keep(group: list[Trajectory]) -> None:
                for trajectory in group:
                    journal.append(trajectory)

            groups = sampling.sample_groups(left, serve())
            asyncio.run(consume_results(groups, keep, console, "sampled", len(left)))
        wanted = set().union(*map(sampling.trajectory_ids, prompts))
        with TrajectoryWriter(folder.trajectories, read_end_of_turn(settings.model.path)) as writer:
            for trajectory in sorted(journal.read(), key=lambda trajectory: trajectory.id):
                if trajectory.id in wanted:
                    writer.write(trajectory)
    return folder.trajectories


def _probe_missing(
    source: Path, limit: int | None, plan: ProbePlan, folder: ProbeFolder, serve: Serve, console: Console
) -> list[Probed]:
    """Run the probes that the folder lacks; returns every probe of the file's trajectories."""
    from itertools import islice

    from forage_probe.metrics import is_finished
    from forage_probe.work import list_probe_items, run_probes
    from forage_records.trajectory_file import read_trajectories

    wanted = [
        item
        for trajectory in islice(read_trajectories(source), limit)
        for item in list_probe_items(trajectory, every=False)
    ]
    with folder.journal() as journal:
        last = {(probed.trajectory_id, probed.turn): probed for probed in journal.read()}
        left = {item for item in wanted if item not in last or not is_finished(last[item])}
        if left:

            def keep(probed: Probed) -> None:
                journal.append(probed)
                last[probed.trajectory_id, probed.turn] = probed

            probes = run_probes(read_trajectories(source), left, serve(), plan)
            asyncio.run(consume_results(probes, keep, console, "probed", len(left)))
    return [last[item] for item in wanted]
