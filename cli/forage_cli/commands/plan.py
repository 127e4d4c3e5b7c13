"""`forage plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from forage_cli.commands.options import Config, Overrides
from forage_runtime.text.terminal import echo


def plan(
    overrides: Overrides = None,
    config: Config = None,
    gpu: Annotated[
        str, typer.Option(help="Kind of GPU, such as H100; empty: this machine's, or H100 without one.")
    ] = "",
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs of one machine, to divide; by default those of local.gpus, or of the settings.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the GPU's operations that training uses.")
    ] = 0.4,
    prefill_mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="The same while prompts and observations are read.")
    ] = 0.5,
    bandwidth_use: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the GPU's bandwidth that generation uses.")
    ] = 0.7,
    fill: Annotated[
        float, typer.Option(min=0.01, max=1, help="Mean lengths and number of searches, as a share of their limits.")
    ] = 0.5,
    retriever_cpus: Annotated[int, typer.Option(min=1, help="CPUs of a replica of the retriever, or of a shard.")] = 32,
    retriever_replicas: Annotated[int, typer.Option(min=1, help="Replicas of the retriever.")] = 1,
    thread_use: Annotated[
        float, typer.Option(min=0, max=1, help="CPUs that each thread of the retriever after the first keeps busy.")
    ] = 0.7,
    search_s: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds of a search.")] = 0.2,
    disk_gbs: Annotated[
        float, typer.Option(min=0.001, max=100_000, help="GB/s at which policies are written and read.")
    ] = 1.0,
    host_gib: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Memory of the machine of retriever and Redis.", show_default=False),
    ] = None,
    passages: Annotated[
        int | None, typer.Option(min=1, help="Passages of the corpus, if its index is not here.", show_default=False)
    ] = None,
) -> None:
    """Compute what a recipe needs on GPUs: memory, time a step, searches, and what to change where it does not fit.

    Nothing is started, and no GPU is needed. Exit code 1: it does not fit.

    Examples:

      forage plan -c configs/search_r1_nq_hotpotqa_grpo_3b.yaml --gpu H100

      forage plan -c configs/search_r1_nq_hotpotqa_grpo_7b.yaml --gpu A100-80GB --gpus 8 --mfu 0.35 --json
    """
    from forage_cli.local.home import load_recipe
    from forage_cli.local.nvidia import find_smallest, list_gpus
    from forage_cli.planning.assumptions import GIB, Assumptions
    from forage_cli.planning.gpus import DEFAULT, get_gpu
    from forage_cli.planning.plan import PlanRequest, make_plan
    from forage_cli.planning.remedies import find_remedies
    from forage_cli.planning.report import describe_plan, to_json
    from forage_cli.planning.retrieval.capacity import Machine
    from forage_cli.planning.shapes import read_shape
    from forage_cli.planning.split import Split, apply_split, divide, find_faster_split
    from forage_runtime.errors import UserError

    settings = load_recipe(config, overrides or [])
    if settings.rollout.engine.endpoint:
        raise UserError(
            "rollout.engine.endpoint samples elsewhere, and nothing is trained then: unset it to plan a run"
        )
    named = settings.local.gpus
    if gpus is not None:
        settings = apply_split(settings, divide(settings, gpus))
    elif named.rollout and named.trainer:
        settings = apply_split(settings, Split(len(named.rollout), len(named.trainer)))
    assumed = Assumptions(
        mfu=mfu,
        prefill_mfu=prefill_mfu,
        bandwidth_use=bandwidth_use,
        fill=fill,
        thread_use=thread_use,
        search_s=search_s,
        disk=disk_gbs * 1e9,
    )
    here = [] if gpu else list_gpus()
    kind = find_smallest(here) if here else get_gpu(gpu or DEFAULT)
    if kind is None:
        products = ", ".join(sorted({found.product for found in here}))
        raise UserError(f"this machine's GPUs ({products}) are of a kind that no plan knows: name the nearest by --gpu")
    host = None if host_gib is None else int(host_gib * GIB)
    machine = Machine(retriever_cpus, retriever_replicas)
    request = PlanRequest(read_shape(settings.model.path), kind, assumed, host, passages, machine)
    made = make_plan(settings, request)
    remedies, faster = find_remedies(settings, request), find_faster_split(settings, request, made)
    if as_json:
        typer.echo(json.dumps(to_json(made, remedies, faster)))
    else:
        for line in describe_plan(made, remedies, faster):
            echo(line)
    raise typer.Exit(0 if made.fits else 1)
