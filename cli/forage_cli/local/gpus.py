"""The GPUs of this machine: which service gets which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from forage_cli.local.home import locate_interpreter
from forage_cli.local.nvidia import LocalGpu, find_smallest, list_gpus
from forage_cli.local.stack import Program, Stack
from forage_cli.planning.gpus import MIB, Gpu
from forage_cli.planning.parts import format_seconds
from forage_cli.planning.plan import Plan, PlanRequest, make_plan
from forage_cli.planning.retrieval.here import estimate_searches, find_machine
from forage_cli.planning.shapes import Shape, read_shape
from forage_cli.planning.split import Split, apply_split, divide, find_faster_split, share_gpu
from forage_runtime.devices import resolve_device
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings


@dataclass(frozen=True)
class Assignment:
    """GPUs of each service by their numbers, and the settings that fit them.

    Attributes:
        gpus: empty: this machine has none; a service without any computes on CPUs.
        plan: of the run with these GPUs; None: nothing is trained on them, or a plan does not know model or GPU.
    """

    settings: Settings
    gpus: Mapping[Program, tuple[int, ...]]
    plan: Plan | None = None

    def build_environment(self, program: Program) -> dict[str, str]:
        """Variables for a service that show it its GPUs alone."""
        if not self.gpus:
            return {}
        numbers = ",".join(map(str, self.gpus.get(program, ())))
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}

    def __str__(self) -> str:
        """Services and their GPUs; empty: no service has one."""
        text = "; ".join(f"{program} {', '.join(map(str, own))}" for program, own in self.gpus.items() if own)
        if self.is_shared:
            share = self.settings.rollout.engine.gpu_memory_utilization
            text += f", shared: the engine takes {share:.0%} of its memory (trainer.placement=colocated: by turns)"
        return text

    @property
    def is_shared(self) -> bool:
        """Whether engine and trainer use the same GPU at once."""
        rollout, trainer = (set(self.gpus.get(program, ())) for program in (Program.ROLLOUT, Program.TRAINER))
        return self.settings.trainer.placement == "separate" and bool(rollout & trainer)


def assign_gpus(settings: Settings, programs: Sequence[Program]) -> Assignment:
    """Divide the GPUs of this machine between the services, by `local.gpus` or by halves.

    A single GPU is for both engine and trainer, each with a part of its memory, where that is enough. Numbers of
    engines and of the trainer's processes follow from it where something is trained.

    Raises:
        UserError: `local.gpus` names a GPU that is not here, or gives one to a service that cannot use it; or the
            driver of GPUs that are needed does not run.
    """
    wanted = settings.local.gpus
    named = {Program.ROLLOUT: wanted.rollout, Program.TRAINER: wanted.trainer, Program.RETRIEVER: wanted.retriever}
    users = [program for program in (Program.ROLLOUT, Program.TRAINER) if program in programs]
    try:
        found = list_gpus()
    except UserError:  # a driver that does not run is of interest where somebody needs it
        if any(named.values()) or any(_computes_on_gpus(settings, program, False) for program in users):
            raise
        found = []
    _check_named({program: own or () for program, own in named.items()}, [gpu.number for gpu in found])
    if Program.RETRIEVER in programs and not settings.retriever.shards:
        _check_retriever(settings.retriever.device, wanted.retriever, bool(found))
    if not found:
        return Assignment(settings, {})
    users = [program for program in users if _computes_on_gpus(settings, program, bool(named[program]))]
    free = [gpu.number for gpu in found if gpu.number not in wanted.retriever]
    gpus = {Program.RETRIEVER: wanted.retriever}
    if len(users) < 2:
        for program in users:
            own = named[program]
            gpus[program] = tuple(free) if own is None else own
        return Assignment(settings, gpus)
    shared = _share(settings, [gpu for gpu in found if gpu.number in free])
    if shared is not None:
        return Assignment(shared, gpus | dict.fromkeys(users, tuple(free)))
    request = _build_request(settings, found)
    own, others = _choose(settings, free, request)
    split = Split(len(own), len(others))
    settings = apply_split(settings, split)
    plan = make_plan(settings, request) if request else None
    return Assignment(settings, gpus | {Program.ROLLOUT: own, Program.TRAINER: others}, plan)


def build_stack(settings: Settings, programs: Sequence[Program], console: Console) -> Stack:
    """The programs of a run, with the GPUs of this machine divided between them; says how, and what does not fit.

    Raises:
        UserError: see `assign_gpus`.
    """
    assignment = assign_gpus(settings, programs)
    if assignment.gpus:
        console.print(f"GPUs: {str(assignment) or 'none is used'}", highlight=False)
    if assignment.plan is not None:
        plan = assignment.plan
        console.print(
            f"by the plan a step takes about {format_seconds(plan.step.total)} (forage plan)", highlight=False
        )
        for problem in _list_problems(plan):
            console.print(f"warning: {problem}", style="yellow", highlight=False)
        faster = find_faster_split(assignment.settings, plan.request, plan)
        if plan.fits and faster is not None:
            split, best = faster
            console.print(
                f"{split.rollout} GPU(s) for the engines and {split.trainer} for the trainer would take about "
                f"{format_seconds(best.step.total)} a step: local.gpus.rollout sets which",
                highlight=False,
            )
    environments = {program: assignment.build_environment(program) for program in programs}
    return Stack(assignment.settings, programs, environments)


def find_plan_problems(settings: Settings) -> list[str]:
    """What of a whole run does not fit this machine by the plan: without a GPU that it knows, the retriever alone.

    Raises:
        UserError: see `assign_gpus`.
    """
    plan = assign_gpus(settings, tuple(Program)).plan
    if plan is not None:
        return _list_problems(plan)
    searches = estimate_searches(settings)
    return [] if searches is None or searches.fits else [searches.describe_problem()]


def _list_problems(plan: Plan) -> list[str]:
    return [f"{problem}: 'forage plan' says what would fit" for problem in plan.problems]


def _check_named(named: Mapping[Program, Sequence[int]], found: Sequence[int]) -> None:
    for program, numbers in named.items():
        for number in numbers:
            if number not in found:
                here = ", ".join(map(str, found)) or "none"
                raise UserError(f"local.gpus.{program} has GPU {number}, and this machine has {here}: name these")


def _check_retriever(device: str, named: Sequence[int], has_gpus: bool) -> None:
    if device == "gpu" and not named:
        lacks = "local.gpus.retriever gives it none: name its GPUs there, or" if has_gpus else "this machine has none:"
        raise UserError(f"retriever.device is gpu, and {lacks} set retriever.device=cpu or auto")
    if device == "cpu" and named:
        raise UserError("local.gpus.retriever has GPUs, and the retriever computes on CPUs: retriever.device is cpu")


def _computes_on_gpus(settings: Settings, program: Program, is_named: bool) -> bool:
    if program is Program.ROLLOUT and settings.rollout.engine.endpoint:
        return False
    device = settings.rollout.device if program is Program.ROLLOUT else settings.trainer.device
    packages = next(locate_interpreter(program).parents[1].glob("lib/python*/site-packages"), None)
    assert packages is not None, "an environment with a Python has packages"
    uses = resolve_device(device, f"{program}.device", packages / "torch")
    if is_named and not uses:
        why = f"{program}.device is cpu" if device == "cpu" else "its PyTorch was built for CPUs"
        raise UserError(f"local.gpus.{program} has GPUs, and the {program} computes on CPUs: {why}")
    return uses


def _build_request(settings: Settings, found: Sequence[LocalGpu]) -> PlanRequest | None:
    """For a plan on the smallest of these GPUs; None: it does not know them, or the model."""
    kind, shape = find_smallest(found), _find_shape(settings)
    return None if kind is None or shape is None else PlanRequest(shape, kind, retriever=find_machine(settings))


def _find_shape(settings: Settings) -> Shape | None:
    try:
        return read_shape(settings.model.path)
    except UserError:
        return None


def _share(settings: Settings, free: Sequence[LocalGpu]) -> Settings | None:
    """The settings of a run whose engine and trainer share the only GPU at once; None: they need not, or cannot."""
    wanted, trainer = settings.local.gpus, settings.trainer
    if len(free) != 1 or trainer.placement == "colocated" or wanted.rollout or wanted.trainer:
        return None
    shape = _find_shape(settings)
    if shape is None:
        return None
    # Speeds do not matter here, so a GPU that no plan knows will do.
    [gpu] = free
    return share_gpu(settings, PlanRequest(shape, Gpu(gpu.product, gpu.memory_mib * MIB, 1.0, 1.0)))


def _choose(
    settings: Settings, free: Sequence[int], request: PlanRequest | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """GPUs of the engines and of the trainer."""
    rollout, trainer = settings.local.gpus.rollout, settings.local.gpus.trainer
    if settings.trainer.placement == "colocated":
        both = rollout or trainer
        if both:
            return both, both
        split = divide(settings, len(free))
        return tuple(free[: split.rollout]), tuple(free[: split.trainer])
    if rollout is None and trainer is None:
        count = _split(settings, len(free), request).rollout
        return tuple(free[:count]), tuple(free[count:])
    own = rollout if rollout is not None else tuple(number for number in free if number not in (trainer or ()))
    others = trainer if trainer is not None else tuple(number for number in free if number not in own)
    for program, chosen in ((Program.ROLLOUT, own), (Program.TRAINER, others)):
        if not chosen:
            raise UserError(f"local.gpus leaves no GPU for the {program}: give the other one fewer")
    return own, others


def _split(settings: Settings, gpus: int, request: PlanRequest | None) -> Split:
    """As the settings say where they use all; else by halves, or as it fits where halves do not."""
    rollout, trainer = settings.rollout, settings.trainer
    asked = Split(
        rollout.engine_replicas.min * rollout.engine.tensor_parallel_size, trainer.nnodes * trainer.n_gpus_per_node
    )
    if asked.rollout + asked.trainer == gpus:
        return asked
    halves = divide(settings, gpus)
    if request is None:
        return halves
    divided = apply_split(settings, halves)
    plan = make_plan(divided, request)
    fitting = None if plan.fits else find_faster_split(divided, request, plan)
    return fitting[0] if fitting is not None else halves
