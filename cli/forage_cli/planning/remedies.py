"""Changes of settings that make a plan fit: each is tried, and only those that do are told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from forage_cli.planning.changes import apply_changes
from forage_cli.planning.plan import Plan, PlanRequest, make_plan
from forage_cli.planning.retrieval.capacity import list_cheaper
from forage_cli.planning.split import find_faster_split
from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings

_UTILIZATIONS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_LORA_RANK = 32
_MOST_GPUS = 64
_MOST_REMEDIES = 4


@dataclass(frozen=True)
class Remedy:
    """Settings that make a plan fit, and the plan with them."""

    changes: Mapping[str, object]
    plan: Plan

    def __str__(self) -> str:
        return " ".join(f"{name}={_format(value)}" for name, value in self.changes.items())


def find_remedies(settings: Settings, request: PlanRequest) -> list[Remedy]:
    """A few changes that make the plan fit, those that cost least first; empty where nothing tried does.

    Where no single change is enough, one combination of them.
    """
    plan = make_plan(settings, request)
    if plan.fits:
        return []
    if request.passages is None and plan.retrieval is not None:  # an index of another type holds the same passages
        request = replace(request, passages=plan.retrieval.passages)
    found: list[Remedy] = []
    for kind in _list_kinds(settings, plan):
        for changes in kind:
            tried = _try(settings, request, changes)
            if tried is not None and tried.fits:
                found.append(Remedy(changes, tried))
                break
    faster = find_faster_split(settings, request, plan)
    if faster is not None:
        split, best = faster
        engines = split.rollout // settings.rollout.engine.tensor_parallel_size
        replicas = {"min": engines, "max": engines}
        changes = {"trainer.n_gpus_per_node": split.trainer, "rollout.engine_replicas": replicas}
        found.insert(0, Remedy(changes, best))
    return found[:_MOST_REMEDIES] or _combine(settings, request, plan)


def _combine(settings: Settings, request: PlanRequest, plan: Plan) -> list[Remedy]:
    """Take the strongest change of each kind until all fits."""
    total: dict[str, object] = {}
    for kind in _list_kinds(settings, plan):
        *_, strongest = list(kind) or [{}]
        tried = _try(settings, request, total | strongest)
        if tried is None:
            continue
        total |= strongest
        if tried.fits:
            return [Remedy(total, tried)]
    return []


def _try(settings: Settings, request: PlanRequest, changes: Mapping[str, object]) -> Plan | None:
    try:
        return make_plan(apply_changes(settings, changes), request)
    except SettingsError:
        return None  # other settings exclude it


def _list_kinds(settings: Settings, plan: Plan) -> list[Iterator[dict[str, object]]]:
    """Kinds of changes; those of a kind from weak to strong."""
    kinds: list[Iterator[dict[str, object]]] = []
    if not plan.trainer.fits:
        kinds += [
            _recompute(settings),
            _sync_gradients(settings),
            _fuse(settings),
            _shrink_micro_batches(settings),
            _offload_reference(settings),
            _offload(settings),
            _add_trainers(settings, plan),
            _use_lora(settings),
        ]
    if not plan.rollout.fits:
        kinds += [_change_utilization(), _sample_fewer(settings), _shard_engines(settings)]
    if not plan.can_shard:
        kinds.append(_shard_less(settings))
    if not plan.fits_host:
        kinds.append(_save_more_often(settings))
    if plan.retrieval is not None and not plan.retrieval.fits:
        kinds += list_cheaper(settings, plan.retrieval)
    return kinds


def _save_more_often(settings: Settings) -> Iterator[dict[str, object]]:
    """Groups stay in Redis until a checkpoint has them."""
    steps = settings.trainer.save_freq
    while steps > 1:
        steps //= 2
        yield {"trainer.save_freq": steps}


def _recompute(settings: Settings) -> Iterator[dict[str, object]]:
    if settings.trainer.engine.enable_gradient_checkpointing is False:
        yield {"trainer.engine.enable_gradient_checkpointing": True}


def _sync_gradients(settings: Settings) -> Iterator[dict[str, object]]:
    if settings.trainer.engine.args.get("use_no_sync_for_gradient_accumulation"):
        yield {"trainer.engine.args.use_no_sync_for_gradient_accumulation": False}


def _fuse(settings: Settings) -> Iterator[dict[str, object]]:
    if settings.trainer.engine.use_fused_kernels is False:
        yield {"trainer.engine.use_fused_kernels": True}


def _shrink_micro_batches(settings: Settings) -> Iterator[dict[str, object]]:
    """Halve them, down to the longest trajectory, which cannot be divided."""
    tokens, least = settings.trainer.actor.ppo_max_token_len_per_gpu, settings.rollout.longest_trajectory
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield {"trainer.actor.ppo_max_token_len_per_gpu": tokens}


def _offload_reference(settings: Settings) -> Iterator[dict[str, object]]:
    if not settings.trainer.ref.param_offload:
        yield {"trainer.ref.param_offload": True}


def _offload(settings: Settings) -> Iterator[dict[str, object]]:
    if not settings.trainer.engine.offload_policy:
        yield {"trainer.engine.args.offload_policy": True}


def _add_trainers(settings: Settings, plan: Plan) -> Iterator[dict[str, object]]:
    if settings.trainer.nnodes > 1 or plan.is_colocated:
        return
    count = 2 * settings.trainer.n_gpus_per_node
    while count <= _MOST_GPUS:
        yield {"trainer.n_gpus_per_node": count}
        count *= 2


def _use_lora(settings: Settings) -> Iterator[dict[str, object]]:
    if not settings.trainer.lora.lora_rank:
        yield {"trainer.lora.lora_rank": _LORA_RANK}


def _change_utilization() -> Iterator[dict[str, object]]:
    for share in _UTILIZATIONS:
        yield {"rollout.engine.gpu_memory_utilization": share}


def _sample_fewer(settings: Settings) -> Iterator[dict[str, object]]:
    count = settings.rollout.engine.max_num_seqs
    while count > 8:
        count //= 2
        yield {"rollout.engine.max_num_seqs": count}


def _shard_engines(settings: Settings) -> Iterator[dict[str, object]]:
    size = settings.rollout.engine.tensor_parallel_size
    while size < 8:
        size *= 2
        yield {"rollout.engine.tensor_parallel_size": size}


def _shard_less(settings: Settings) -> Iterator[dict[str, object]]:
    for size in range(settings.rollout.engine.tensor_parallel_size - 1, 0, -1):
        yield {"rollout.engine.tensor_parallel_size": size}


def _format(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
