"""Whether the retriever answers as fast as a run searches: queries a second that are needed, and that it gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.parts import format_seconds
from forage_cli.planning.retrieval.corpus import describe_corpus
from forage_cli.planning.retrieval.cost import EXACT, Cost, UnknownCostError, estimate_cost, list_measured
from forage_runtime.settings import EncoderPrecision, RetrievalMode, RetrieverSettings, RolloutSettings, Settings

_SEQUENCES_A_PLACE = 4
"""Trajectories in flight of each sequence of an engine, where `rollout.max_trajectories_in_flight` is 0."""


@dataclass(frozen=True)
class Machine:
    """What the retriever runs on.

    Attributes:
        cpus: of one replica, or of one shard.
        replicas: of the whole index.
    """

    cpus: int
    replicas: int = 1


USUAL_MACHINE = Machine(32)
"""For which a plan is made where nobody says."""


@dataclass(frozen=True)
class Retrieval:
    """Queries a second of a run.

    Attributes:
        searching: trajectories in flight, which may all search at once.
        limit_s: in which each of them must have its answer.
        mean: queries a second while engines sample; 0: not known.
        given: queries a second; None: not measured, and `why` says what was not.
        cost: of one query; None where `given` is.
        threads: of one replica.
        passages: that are searched, of one shard; None: not known.
        why: what is searched, or what is not known.
    """

    searching: int
    limit_s: float
    mean: float
    given: float | None
    cost: Cost | None
    threads: int
    machine: Machine
    passages: int | None
    why: str

    @property
    def peak(self) -> float:
        """Queries a second that answer a search of every trajectory in flight within the client's limit."""
        return self.searching / self.limit_s

    @property
    def needed(self) -> float:
        return max(self.mean, self.peak)

    @property
    def given_over_needed(self) -> float | None:
        return None if self.given is None else self.given / self.needed if self.needed else math.inf

    @property
    def turn_s(self) -> float | None:
        """Until the last of all trajectories in flight has its answer, where all search at once."""
        return None if self.given is None else self.searching / self.given

    @property
    def fits(self) -> bool:
        """Whether it answers fast enough; true where that is not known."""
        return self.given_over_needed is None or self.given_over_needed >= 1

    def describe_problem(self) -> str:
        """What is too slow, in a sentence; empty where nothing is."""
        if self.fits:
            return ""
        assert self.given is not None
        assert self.turn_s is not None
        machines = f" in each of {self.machine.replicas} replicas" if self.machine.replicas > 1 else ""
        return (
            f"the retriever answers {format_rate(self.given)} queries/s ({self.why}, {self.threads} thread(s) on "
            f"{self.machine.cpus} CPUs{machines}), and the run needs {format_rate(self.needed)}: a search of the "
            f"{self.searching} trajectories in flight takes {format_seconds(self.turn_s)}, of which each may wait "
            f"{format_seconds(self.limit_s)}; {self.count_replicas()} such replicas would do"
        )

    def count_replicas(self) -> int:
        """Replicas like this one that answer fast enough."""
        assert self.given is not None
        return math.ceil(self.needed * self.machine.replicas / self.given)


def estimate_retrieval(
    settings: Settings, machine: Machine, assumed: Assumptions, passages: int | None = None, mean: float = 0.0
) -> Retrieval | None:
    """Compare what a run needs with what its retriever gives; None: the run has no searches.

    Args:
        passages: of the corpus; None: those of the index, or of the corpus, where they are known.
        mean: queries a second over the time in which engines sample; 0: not known.
    """
    rollout, retriever = settings.rollout, settings.retriever
    if not rollout.max_turns or not _searches(settings):
        return None
    threads = min(retriever.threads, machine.cpus) or machine.cpus
    searching = count_searching(settings)
    given, cost = None, None
    corpus = describe_corpus(settings, passages)
    try:
        if retriever.device == "gpu" or settings.local.gpus.retriever:
            raise UnknownCostError("not measured: a retriever on GPUs (retriever.device, local.gpus.retriever)")
        cost = estimate_cost(retriever, corpus)
        given = machine.replicas * _use(threads, assumed) / cost.total
        why = str(corpus)
    except UnknownCostError as error:
        why = str(error)
    return Retrieval(searching, rollout.retrieve_timeout_s, mean, given, cost, threads, machine, corpus.passages, why)


def count_searching(settings: Settings) -> int:
    """Trajectories in flight at most: as the limits of the rollout and the prompts that the trainer issues allow."""
    rollout, batches = settings.rollout, settings.trainer.max_staleness + 1
    issued = settings.data.train_batch_size * rollout.n * batches
    groups = rollout.max_groups_in_flight * rollout.n
    return max(1, min(issued, groups, _limit_trajectories(rollout)))


def _limit_trajectories(rollout: RolloutSettings) -> int:
    places = _SEQUENCES_A_PLACE * rollout.engine.max_num_seqs * rollout.engine_replicas.max
    return rollout.max_trajectories_in_flight or places


def _searches(settings: Settings) -> bool:
    """Whether any data source uses the environment that searches; sources without a route do."""
    routes = settings.rollout.environments
    sources = set(settings.reward.routes) or {""}
    return any(source not in routes or routes[source].name == "search" for source in sources)


def _use(threads: int, assumed: Assumptions) -> float:
    """CPUs that so many threads keep busy: one alone all of its own, of several a share each."""
    return 1 + (threads - 1) * assumed.thread_use


def list_cheaper(settings: Settings, retrieval: Retrieval) -> Iterator[Iterator[dict[str, object]]]:
    """Changes of settings that make a query cheaper or use more CPUs, by kind; those of a kind from weak to strong."""
    retriever = settings.retriever
    if retrieval.threads < retrieval.machine.cpus:
        yield iter([{"retriever.threads": retrieval.machine.cpus}])
    if retriever.mode is not RetrievalMode.BM25 and retrieval.passages is not None:
        yield _change_index(retriever, retrieval.passages)
    if retriever.encoder.precision != EncoderPrecision.INT8 and not retriever.encoder.url:
        yield iter([{"retriever.encoder.precision": "int8"}])


def _change_index(retriever: RetrieverSettings, passages: int) -> Iterator[dict[str, object]]:
    """Measured types, those with the best recall first; an index of another type has a folder of its own.

    The last, which combinations of changes take, is the best of those that do not read every vector.
    """
    types = list_measured(passages)
    for changes in (*types, *[one for one in types if one["retriever.faiss_factory"] != EXACT][:1]):
        factory = str(changes["retriever.faiss_factory"])
        if retriever.index is not None:
            yield changes | {"retriever.index": f"{retriever.index}-{factory.lower().replace(',', '-')}"}
        else:
            yield changes


def format_rate(rate: float) -> str:
    """Queries a second for a reader: "2.1", "340"."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
