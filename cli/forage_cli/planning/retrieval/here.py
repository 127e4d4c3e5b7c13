"""Whether the retriever of this machine answers as fast as a run searches."""

from __future__ import annotations

from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.parts import format_seconds
from forage_cli.planning.retrieval.capacity import (
    USUAL_MACHINE,
    Machine,
    Retrieval,
    estimate_retrieval,
    format_rate,
)
from forage_runtime.devices import count_cpus
from forage_runtime.settings import Settings

_HERE = ("127.", "localhost", "0.0.0.0", "[")


def find_machine(settings: Settings) -> Machine:
    """What the retriever runs on: this machine where its address is here, else one as plans assume."""
    is_here = settings.retriever.http_address.startswith(_HERE)
    return Machine(count_cpus()) if is_here else USUAL_MACHINE


def estimate_searches(settings: Settings) -> Retrieval | None:
    """Searches needed and given, without the time of a step, which only a plan knows; None: nothing searches."""
    return estimate_retrieval(settings, find_machine(settings), Assumptions())


def describe_searches(retrieval: Retrieval) -> str:
    """In one line."""
    asked = f"{retrieval.searching} at once within {format_seconds(retrieval.limit_s)}"
    if retrieval.given is None or retrieval.turn_s is None:
        return f"{asked}; {retrieval.why}"
    return (
        f"{asked}; {retrieval.why} answers about {format_rate(retrieval.given)} queries/s with {retrieval.threads} "
        f"thread(s) on {retrieval.machine.cpus} CPUs, {format_seconds(retrieval.turn_s)} for all"
    )
