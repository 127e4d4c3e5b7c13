"""verl's worker group of the trainer's ranks, and the nodes of a Ray cluster that they run on.

Import it once verl knows its platform: the machines of the ranks count, not this one.
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

from forage_common.errors import UserError
from forage_common.settings import Settings
from forage_trainer.launch.ray_rank import Rank

_NODE_ID = "ray.io/node-id"
_LOOK_S = 0.5


def worker_group(settings: Settings, gpus: bool, check: Callable[[], None]) -> RayWorkerGroup:
    """Start the ranks, once there is room for them.

    Args:
        gpus: whether each has one.
        check: is called while waiting, and raises to give up.

    Raises:
        UserError: there is no room.
    """
    trainer = settings.trainer
    rank = RayClassWithInitArgs(ray.remote(Rank), settings, Path.cwd())
    rank.update_options({"max_concurrency": 2})
    return RayWorkerGroup(
        Nodes(trainer.nnodes, trainer.n_gpus_per_node, gpus, trainer.ray.wait_s, check),
        rank,
        name_prefix=f"{settings.run.id}:",
        device_name=get_platform().device_name,
        # Both must be there before torch is loaded.
        worker_env={"OMP_WAIT_POLICY": "PASSIVE"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    )


class Nodes(RayResourcePool):  # type: ignore[misc, unused-ignore]
    """verl's pool of resources, equally many on each of so many nodes; verl's own may put two shares on one node."""

    def __init__(self, nnodes: int, per_node: int, gpus: bool, wait_s: float, check: Callable[[], None]) -> None:
        """
        Args:
            per_node: processes, each with a CPU and, with `gpus`, a GPU.
            wait_s: for nodes with room.
            check: is called while waiting, and raises to give up.
        """
        super().__init__(process_on_nodes=[per_node] * nnodes, use_gpu=gpus, max_colocate_count=1)
        self._bundles = [{"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}] * per_node
        self._wait_s = wait_s
        self._check = check
        self._found: list[PlacementGroup] = []

    def get_placement_groups(self, *_: Any, **__: Any) -> list[PlacementGroup]:
        """One on each node, by the nodes' addresses.

        Raises:
            UserError: the cluster has had no room for so long.
        """
        if not self._found:
            deadline = time.monotonic() + self._wait_s
            taken: dict[str, PlacementGroup] = {}
            for _number in self.store:
                group = self._reserve(list(taken))
                while not group.wait(_LOOK_S):
                    self._check()
                    if time.monotonic() > deadline:
                        raise UserError(self._no_room(len(taken)))
                taken[placement_group_table(group)["bundles_to_node_id"][0]] = group
            self._found = sort_placement_group_by_node_ip(list(taken.values()))
        return self._found

    def _reserve(self, taken: list[str]) -> PlacementGroup:
        """Room for one node's processes, on none of the nodes that are taken."""
        elsewhere = {_NODE_ID: f"!in({','.join(taken)})"} if taken else {}
        return placement_group(
            self._bundles, strategy="STRICT_PACK", bundle_label_selector=[elsewhere] * len(self._bundles)
        )

    def _no_room(self, found: int) -> str:
        kind = "GPU" if self.use_gpu else "CPU"
        nodes = [
            f"{node['NodeManagerAddress']} ({node['Resources'].get(kind, 0):.0f})"
            for node in ray.nodes()
            if node["Alive"]
        ]
        return (
            f"trainer.nnodes={len(self.store)} with trainer.n_gpus_per_node={len(self._bundles)} found {found} node(s) "
            f"with so many free {kind}s within trainer.ray.wait_s={self._wait_s:g} s; Ray's nodes and their {kind}s: "
            f"{', '.join(nodes)}. Add nodes, end what runs there, or ask for less"
        )
