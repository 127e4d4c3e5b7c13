"""A plan for a reader, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from forage_cli.planning.parts import Memory, MemoryUse, format_gib, format_seconds
from forage_cli.planning.plan import Plan, to_gib
from forage_cli.planning.remedies import Remedy
from forage_cli.planning.retrieval.capacity import Retrieval, format_rate
from forage_cli.planning.split import Split

FORMAT = 1
"""Version of the JSON; a change that breaks readers raises it."""
_PHASES = {
    "prefill": "prompts and passages",
    "decode": "generation",
    "tail": "longest trajectory",
    "scoring": "scoring",
    "training": "training",
    "publishing": "publication",
    "moving": "moving to the host",
}
"""Parts of a step's time, and what the text calls them."""


def describe_plan(plan: Plan, remedies: Sequence[Remedy], faster: tuple[Split, Plan] | None) -> Iterator[str]:
    """Lines of text."""
    yield _describe_model(plan)
    yield ""
    yield from _describe_memory(plan.trainer)
    yield ""
    yield from _describe_memory(plan.rollout.memory)
    yield _describe_cache(plan)
    yield ""
    yield "memory of the machines"
    yield from _describe_lines(plan.hosts)
    yield ""
    yield from _describe_step(plan)
    yield ""
    if plan.retrieval is not None:
        yield from describe_retrieval(plan.retrieval)
        yield ""
    if plan.fits:
        yield "It fits."
    for problem in plan.problems:
        yield f"Does not fit: {problem}."
    for remedy in remedies:
        more = f"{remedy.plan.gpus} GPUs, " if remedy.plan.gpus > plan.gpus else ""
        yield f"  would fit with {remedy} ({more}{_describe_remedied(remedy.plan)})"
    if plan.problems and not remedies:
        yield "  no change of settings that was tried makes it fit"
    yield _describe_balance(plan)
    if plan.fits and faster is not None:
        split, best = faster
        yield (
            f"Faster on the same GPUs: {split.rollout} for the engines and {split.trainer} for the trainer, "
            f"{format_seconds(best.step.total)} a step instead of {format_seconds(plan.step.total)}."
        )
    yield ""
    yield from _describe_assumptions(plan)


def to_json(plan: Plan, remedies: Sequence[Remedy], faster: tuple[Split, Plan] | None) -> dict[str, Any]:
    """The same as an object; sizes in GiB, times in seconds."""
    rollout, step = plan.rollout, plan.step
    return {
        "format": FORMAT,
        "model": {"source": plan.request.shape.source, "parameters": plan.request.shape.parameters},
        "gpu": {"kind": plan.request.gpu.name, "memory_gib": to_gib(plan.request.gpu.memory), "count": plan.gpus},
        "placement": "colocated" if plan.is_colocated else "separate",
        "fits": plan.fits,
        "problems": list(plan.problems),
        "remedies": [dict(remedy.changes) for remedy in remedies],
        "trainer": _memory_to_json(plan.trainer),
        "rollout": _memory_to_json(rollout.memory)
        | {
            "engines": rollout.engines,
            "kv_tokens": rollout.kv_tokens,
            "concurrency": rollout.concurrency,
            "full_length_sequences": rollout.full_length,
        },
        "hosts": [_part_to_json(part) for part in plan.hosts],
        "retrieval": None if plan.retrieval is None else _retrieval_to_json(plan.retrieval),
        "step_s": {name: round(getattr(step, name), 2) for name in (*_PHASES, "total")},
        "rollout_idle": round(step.rollout_idle, 3),
        "trainer_idle": round(step.trainer_idle, 3),
        "faster_split": dataclasses.asdict(faster[0]) | {"step_s": round(faster[1].step.total, 2)} if faster else None,
        "assumptions": dataclasses.asdict(plan.request.assumed),
    }


def _memory_to_json(memory: Memory) -> dict[str, Any]:
    return {
        "gpus": memory.gpus,
        "moment": memory.moment,
        "total_gib": to_gib(memory.total),
        "limit_gib": to_gib(memory.limit),
        "fits": memory.fits,
        "parts": [_part_to_json(part) for part in memory.parts],
    }


def _retrieval_to_json(retrieval: Retrieval) -> dict[str, Any]:
    ratio, cost = retrieval.given_over_needed, retrieval.cost
    return {
        "needed_qps": round(retrieval.needed, 2),
        "mean_qps": round(retrieval.mean, 2),
        "peak_qps": round(retrieval.peak, 2),
        "given_qps": None if retrieval.given is None else round(retrieval.given, 2),
        "given_over_needed": None if ratio is None else round(ratio, 2),
        "cpu_s": None if cost is None else round(cost.total, 6),
        "recall_at_3": None if cost is None else cost.recall,
        "recall_measured_over": None if cost is None else cost.measured,
        "threads": retrieval.threads,
        "why": retrieval.why,
    }


def _part_to_json(part: MemoryUse) -> dict[str, Any]:
    return {"name": part.name, "gib": to_gib(part.size), "why": part.why}


def _describe_model(plan: Plan) -> str:
    shape, gpu = plan.request.shape, plan.request.gpu
    shared = "shared by engines and trainer" if plan.is_colocated else "divided between engines and trainer"
    return (
        f"{shape.source}, {shape.parameters / 1e9:.2f} billion parameters, on {plan.gpus} × {gpu.name} "
        f"({format_gib(gpu.memory)}), {shared}"
    )


def _describe_memory(memory: Memory) -> Iterator[str]:
    yield f"{memory.of}: {memory.gpus} GPU(s), {_share(memory)} at most, in {memory.moment}"
    yield from _describe_lines(memory.parts)


def _describe_lines(parts: Sequence[MemoryUse]) -> Iterator[str]:
    for part in parts:
        yield f"  {part.name:<20} {to_gib(part.size):8.2f} GiB   {part.why}"


def _describe_cache(plan: Plan) -> str:
    rollout = plan.rollout
    return (
        f"  an engine holds {rollout.concurrency} sequences of the mean length ({plan.work.length:.0f} tokens), "
        f"{rollout.full_length} of full length; max_num_seqs is {rollout.max_num_seqs}"
    )


def _describe_step(plan: Plan) -> Iterator[str]:
    step, work = plan.step, plan.work
    how = "sampling beside training" if step.is_overlapped else "sampling, then training"
    what = f"{work.trajectories} trajectories of {work.length:.0f} tokens"
    yield f"a step: {format_seconds(step.total)} for {what}, {how}"
    for name, label in _PHASES.items():
        if seconds := getattr(step, name):
            yield f"  {label:<20} {seconds:8.1f} s"


def describe_retrieval(retrieval: Retrieval) -> Iterator[str]:
    """Lines of what a run searches, and what its retriever answers."""
    machines = f"{retrieval.machine.replicas} × {retrieval.machine.cpus} CPUs, {retrieval.threads} thread(s) each"
    yield f"searches: {retrieval.why}; {machines}"
    mean = f"{format_rate(retrieval.mean)} on average, " if retrieval.mean else ""
    limit = format_seconds(retrieval.limit_s)
    all_at_once = f"{format_rate(retrieval.peak)} to answer {retrieval.searching} at once within {limit}"
    yield f"  {'needed':<20} {retrieval.needed:8.0f} queries/s   {mean}{all_at_once}"
    if retrieval.cost is None or retrieval.given is None or retrieval.given_over_needed is None:
        yield f"  {'given':<20} {'?':>8}"
        return
    cost = retrieval.cost
    parts = f"CPU ms a query: encoding {1000 * cost.encoding:.1f}, search {1000 * cost.search:.1f}"
    recall = "" if cost.recall is None else f"; recall@3 {cost.recall:.3f} over {cost.measured:,} passages"
    yield f"  {'given':<20} {retrieval.given:8.0f} queries/s   {parts}{recall}"
    yield f"  {'given / needed':<20} {retrieval.given_over_needed:8.1f}"


def _describe_remedied(plan: Plan) -> str:
    """What a remedy changes: memory and time, and searches where they are checked."""
    ratio = plan.retrieval.given_over_needed if plan.retrieval else None
    searches = "" if ratio is None else f", searches {ratio:.1f} times what is needed"
    return f"trainer {_share(plan.trainer)}, step {format_seconds(plan.step.total)}{searches}"


def _describe_balance(plan: Plan) -> str:
    step = plan.step
    if plan.is_colocated:
        return "Engines and trainer take turns on the same GPUs."
    idle = f"Idle: rollout {step.rollout_idle:.0%}, trainer {step.trainer_idle:.0%} of a step"
    if not step.is_overlapped:
        return f"{idle}; trainer.max_staleness=1 lets them work at the same time."
    grow = "the rollout" if step.trainer_idle > step.rollout_idle else "the trainer"
    return f"{idle}; more GPUs help most in {grow}."


def _describe_assumptions(plan: Plan) -> Iterator[str]:
    assumed, gpu = plan.request.assumed, plan.request.gpu
    yield "Assumed, and options of this command:"
    yield f"  --mfu {assumed.mfu:g} of {gpu.flops / 1e12:.0f} TFLOP/s in training, {assumed.prefill_mfu:g} in prefill"
    yield f"  --bandwidth-use {assumed.bandwidth_use:g} of {gpu.bandwidth / 1e9:.0f} GB/s in generation"
    yield f"  --fill {assumed.fill:g} of every length and of the searches, on average; --search-s {assumed.search_s:g}"
    machine = plan.request.retriever
    yield (
        f"  --retriever-cpus {machine.cpus} --retriever-replicas {machine.replicas}, of which each further thread uses "
        f"{assumed.thread_use:g} (--thread-use)"
    )
    yield f"  --disk-gbs {assumed.disk / 1e9:g} for policies; {assumed.pcie / 1e9:g} GB/s between GPU and host"
    yield "Not counted: checkpoints, validation, communication (in the MFU), and what else uses the GPUs."


def _share(memory: Memory) -> str:
    return f"{format_gib(memory.total)} of {format_gib(memory.limit)}"
