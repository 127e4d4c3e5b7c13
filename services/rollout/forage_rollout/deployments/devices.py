"""The GPUs that engine replicas ask of Ray: counted from the settings, as a cluster may get its GPU nodes later."""

from __future__ import annotations

import os
from collections.abc import Sequence

from forage_runtime.devices import find_cuda_version, resolve_device
from forage_runtime.errors import UserError
from forage_runtime.settings import RolloutSettings


def count_gpus(rollout: RolloutSettings) -> int:
    """GPUs of one engine replica; 0: it computes on CPUs, or is an endpoint.

    Raises:
        UserError: the installed vLLM cannot compute on `rollout.device`.
    """
    if rollout.engine.endpoint:
        return 0
    if resolve_device(rollout.device, "rollout.device"):
        return rollout.engine.tensor_parallel_size
    if cuda := find_cuda_version():
        raise UserError(
            f"rollout.device is cpu, and the installed vLLM was built for CUDA {cuda}, which computes on GPUs alone: "
            "install that for CPUs with 'make setup DEVICE=cpu', or set rollout.device=auto"
        )
    return 0


def list_node_gpus() -> list[int]:
    """GPUs of each living node of the cluster that this process is connected to."""
    import ray

    return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


def check_nodes(rollout: RolloutSettings, nodes: Sequence[int]) -> None:
    """Check that a replica fits on a node: vLLM's processes share a node's memory, and read policies from its disk.

    Args:
        nodes: GPUs of each node. Where none has GPUs yet they come later, and nothing is checked.

    Raises:
        UserError: every GPU node is too small.
    """
    needed, largest = count_gpus(rollout), max(nodes, default=0)
    if 0 < largest < needed:
        raise UserError(
            f"rollout.engine.tensor_parallel_size is {needed}, and the largest of Ray's nodes has {largest} GPU(s): "
            f"an engine runs on one node. Set it to {largest} or less, or add a node with {needed} GPUs first"
        )


def check_machine(rollout: RolloutSettings, gpus: int) -> None:
    """Check that this machine has GPUs for the replicas that are started at once: no others will come.

    Args:
        gpus: how many Ray has found.

    Raises:
        UserError: there are too few.
    """
    size, replicas = count_gpus(rollout), rollout.engine_replicas.min
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if size and not gpus:
        raise UserError(
            f"the installed vLLM was built for CUDA {find_cuda_version()}, and this machine shows no GPU{where}: "
            "'forage doctor' says what is missing, or install vLLM for CPUs with 'make setup DEVICE=cpu'"
        )
    if size * replicas > gpus:
        raise UserError(
            f"rollout.engine_replicas.min={replicas} with rollout.engine.tensor_parallel_size={size} need "
            f"{size * replicas} GPUs, and this machine shows {gpus}{where}: lower one of them, or show more GPUs"
        )


def describe_shortage(rollout: RolloutSettings, nodes: Sequence[int]) -> str:
    """What replicas wait for; empty: the cluster has GPUs for those that are started at once."""
    needed = count_gpus(rollout) * rollout.engine_replicas.min
    if sum(nodes) >= needed:
        return ""
    return f"{needed} GPU(s) for {rollout.engine_replicas.min} engine(s): Ray's {len(nodes)} node(s) have {sum(nodes)}"
