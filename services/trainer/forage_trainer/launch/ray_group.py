"""verl's worker group of the trainer's ranks, and the nodes of a Ray cluster that it runs on.

Import it after verl's platform is set: that of the ranks' machines, not that of this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import sort_placement_group_by_node_ip

from forage_runtime.errors import UserError
from forage_runtime.settings import Settings
from forage_runtime.telemetry.waits import waiting
from forage_trainer.launch.ray_rank import Rank

_NODE_ID = "ray.io/node-id"
POLL_INTERVAL_S = 0.5
NODES_WAIT_S = 300.0
"""Longest wait for nodes with room: KubeRay's autoscaler has a node within minutes, or has none."""


def start_worker_group(settings: Settings, gpus: bool, check: Callable[[], None]) -> RayWorkerGroup:
    """Start the ranks, once the cluster has room for them.

    Args:
        gpus: whether each rank has a GPU.
        check: called while waiting; raises to give up.

    Raises:
        UserError: the cluster has no room.
    """
    trainer = settings.trainer
    rank = RayClassWithInitArgs(ray.remote(Rank), settings, Path.cwd())
    rank.update_options({"max_concurrency": 2})
    return RayWorkerGroup(
        NodePool(trainer.nnodes, trainer.n_gpus_per_node, gpus, NODES_WAIT_S, check),
        rank,
        name_prefix=f"{settings.run.id}:",
        device_name=get_platform().device_name,
        # Both must be set before torch is loaded.
        worker_env={"OMP_WAIT_POLICY": "PASSIVE"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    )


class NodePool(RayResourcePool):  # type: ignore[misc, unused-ignore]
    """A resource pool of verl with equal shares on distinct nodes; verl's own may put two shares on one node."""

    def __init__(self, nnodes: int, per_node: int, gpus: bool, wait_s: float, check: Callable[[], None]) -> None:
        """
        Args:
            per_node: processes of a node, each with a CPU and, with `gpus`, a GPU.
            wait_s: longest wait for nodes with room.
            check: called while waiting; raises to give up.
        """
        super().__init__(process_on_nodes=[per_node] * nnodes, use_gpu=gpus, max_colocate_count=1)
        self._bundles = [{"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}] * per_node
        self._wait_s = wait_s
        self._check = check
        self._groups: list[PlacementGroup] = []

    def get_placement_groups(self, *_: Any, **__: Any) -> list[PlacementGroup]:
        """Reserve a placement group on each node, sorted by the nodes' addresses.

        Raises:
            UserError: the cluster had no room within the time limit.
        """
        if not self._groups:
            deadline = time.monotonic() + self._wait_s
            taken: dict[str, PlacementGroup] = {}
            with waiting("nodes with room for all ranks", on="ray", limit_s=self._wait_s):
                for _number in self.store:
                    group = self._reserve(list(taken))
                    while not group.wait(POLL_INTERVAL_S):
                        self._check()
                        if time.monotonic() > deadline:
                            raise UserError(self._describe_shortage(len(taken)))
                    taken[placement_group_table(group)["bundles_to_node_id"][0]] = group
            self._groups = sort_placement_group_by_node_ip(list(taken.values()))
        return self._groups

    def _reserve(self, taken: list[str]) -> PlacementGroup:
        """Reserve room for one node's processes, on another node than those taken."""
        elsewhere = {_NODE_ID: f"!in({','.join(taken)})"} if taken else {}
        return placement_group(
            self._bundles, strategy="STRICT_PACK", bundle_label_selector=[elsewhere] * len(self._bundles)
        )

    def _describe_shortage(self, taken: int) -> str:
        kind = "GPU" if self.use_gpu else "CPU"
        nodes = [
            f"{node['NodeManagerAddress']} ({node['Resources'].get(kind, 0):.0f})"
            for node in ray.nodes()
            if node["Alive"]
        ]
        return (
            f"trainer.nnodes={len(self.store)} with trainer.n_gpus_per_node={len(self._bundles)} found {taken} node(s) "
            f"with so many free {kind}s within {self._wait_s:g} s; Ray's nodes and their {kind}s: "
            f"{', '.join(nodes)}. Add nodes, end what runs there, or ask for less"
        )
