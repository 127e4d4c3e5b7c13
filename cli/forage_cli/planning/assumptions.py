"""What a plan cannot know: each figure is printed with the plan, and an option of the command."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Assumptions:
    """Figures that differ from machine to machine and from task to task.

    Attributes:
        mfu: share of a GPU's operations that training uses.
        prefill_mfu: the same while prompts and observations are read.
        bandwidth_use: share of a GPU's bandwidth that decoding uses.
        fill: mean length of prompts, generations, observations, and of the number of searches, as a share of its limit.
        thread_use: CPUs that each thread of the retriever beyond the first keeps busy.
        search_s: from a search to its passages.
        disk: bytes a second at which policies are written, and read by the engines.
        pcie: bytes a second between a GPU and its host.
        decode_overhead_s: of a decoding step beside the reading of memory, with CUDA graphs.
        context: bytes of a GPU that CUDA takes in each process, outside of the budget of vLLM.
        workspaces: bytes that NCCL and cuBLAS take.
        graphs: bytes of CUDA graphs of an engine.
        asleep: bytes of a GPU that an engine keeps while it sleeps, in colocated mode.
        fragmentation: share of the trainer's memory that its allocator cannot use.
    """

    mfu: float = 0.4
    prefill_mfu: float = 0.5
    bandwidth_use: float = 0.7
    fill: float = 0.5
    thread_use: float = 0.7
    search_s: float = 0.2
    disk: float = 1e9
    pcie: float = 20e9
    decode_overhead_s: float = 0.004
    context: int = 3 * GIB // 4
    workspaces: int = 3 * GIB // 4
    graphs: int = GIB
    asleep: int = 2 * GIB
    fragmentation: float = 0.05
