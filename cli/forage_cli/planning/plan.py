"""A plan: memory and time of a recipe on GPUs of a kind, what does not fit, and which pool waits for the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from forage_cli.planning.assumptions import GIB, Assumptions
from forage_cli.planning.gpus import Gpu
from forage_cli.planning.hosts import list_host_parts
from forage_cli.planning.parts import Memory, MemoryUse, format_gib
from forage_cli.planning.retrieval.capacity import USUAL_MACHINE, Machine, Retrieval, estimate_retrieval
from forage_cli.planning.rollout_memory import Rollout, estimate_rollout
from forage_cli.planning.shapes import Shape
from forage_cli.planning.step_time import StepTime, estimate_step
from forage_cli.planning.trainer_memory import describe_training, estimate_trainer
from forage_cli.planning.work import Work, estimate_work
from forage_runtime.settings import Settings


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for.

    Attributes:
        host: bytes of memory of the machine that runs retriever and Redis; None: not known, so nothing is checked.
        passages: of the corpus, where its index is not here; None: unknown.
        retriever: what a replica of the retriever runs on, and how many there are.
    """

    shape: Shape
    gpu: Gpu
    assumed: Assumptions = field(default_factory=Assumptions)
    host: int | None = None
    passages: int | None = None
    retriever: Machine = USUAL_MACHINE


@dataclass(frozen=True)
class Plan:
    """What `make_plan` has found.

    Attributes:
        is_colocated: whether rollout and trainer share their GPUs.
        hosts: memory of machines, by service.
        retrieval: queries a second that are needed and given; None: nothing is searched.
    """

    request: PlanRequest
    is_colocated: bool
    work: Work
    rollout: Rollout
    trainer: Memory
    hosts: tuple[MemoryUse, ...]
    step: StepTime
    retrieval: Retrieval | None

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        own = (self.rollout.memory.gpus, self.trainer.gpus)
        return max(own) if self.is_colocated else sum(own)

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit, in one sentence each."""
        found = self._describe_trainer(), self._describe_rollout(), self._describe_shards(), self._describe_host()
        searches = self.retrieval.describe_problem() if self.retrieval else ""
        return tuple(filter(None, (*found, searches)))

    def _describe_trainer(self) -> str:
        memory = self.trainer
        if memory.fits:
            return ""
        return (
            f"a GPU of the trainer needs {format_gib(memory.total)} in {memory.moment}, and {self.request.gpu.name} "
            f"has {format_gib(memory.limit)}"
        )

    def _describe_rollout(self) -> str:
        rollout = self.rollout
        if rollout.fits:
            return ""
        if not rollout.memory.fits:
            return (
                f"a GPU of the rollout needs {format_gib(rollout.memory.total)}, and {self.request.gpu.name} has "
                f"{format_gib(rollout.memory.limit)}"
            )
        return f"the KV cache of an engine holds {rollout.kv_tokens} tokens, less than one sequence of max_model_len"

    @property
    def can_shard(self) -> bool:
        """Whether vLLM takes so many GPUs an engine."""
        return self.request.shape.can_shard(self.rollout.tensor_parallel)

    def _describe_shards(self) -> str:
        if self.can_shard:
            return ""
        shape, size = self.request.shape, self.rollout.tensor_parallel
        return (
            f"rollout.engine.tensor_parallel_size={size} does not divide {shape.heads} heads, {shape.kv_heads} heads "
            f"of keys and an MLP of {shape.intermediate}, and vLLM ends"
        )

    @property
    def fits_host(self) -> bool:
        """Whether the services' parts fit into the memory of one machine; true where that is not known."""
        return self.request.host is None or sum(part.size for part in self.hosts) <= self.request.host

    def _describe_host(self) -> str:
        host, needed = self.request.host, sum(part.size for part in self.hosts)
        if host is None or self.fits_host:
            return ""
        return f"services need {format_gib(needed)} of the machine's memory, and it has {format_gib(host)}"

    @property
    def fits(self) -> bool:
        return not self.problems


def make_plan(settings: Settings, request: PlanRequest) -> Plan:
    """Plan a recipe whose engines and trainer compute on GPUs of one kind."""
    shape, assumed, limit = request.shape, request.assumed, request.gpu.memory
    is_colocated = settings.trainer.placement == "colocated"
    work = estimate_work(settings, assumed.fill)
    training = describe_training(settings, shape)
    rollout = estimate_rollout(
        settings, shape, limit, work, assumed, assumed.context + assumed.workspaces if is_colocated else 0
    )
    trainer = estimate_trainer(settings, shape, limit, assumed, assumed.asleep if is_colocated else 0)
    step = estimate_step(settings, shape, request.gpu, work, training, rollout, assumed, is_colocated)
    searched = work.trajectories * work.searches / step.sampling
    return Plan(
        request=request,
        is_colocated=is_colocated,
        work=work,
        rollout=rollout,
        trainer=trainer,
        hosts=tuple(list_host_parts(settings, shape, training, request.passages)),
        step=step,
        retrieval=estimate_retrieval(settings, request.retriever, assumed, request.passages, searched),
    )


def to_gib(size: float) -> float:
    """Bytes in GiB, with two digits."""
    return round(size / GIB, 2)
