"""Where engine replicas listen for agents, as the router of this process has heard of it.

Apart from `routing`, whose code Serve copies to each process that routes, with all that the module holds: what the
router notes there, nobody else would see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from forage_rollout.links.link import Door

_ADDRESS, _KEY = "link_address", "link_key"
OnDoors = Callable[[Mapping[str, Door]], None]


def describe_door(door: Door) -> dict[str, str]:
    """What a replica reports of itself once; Serve's controller tells it every router, on Ray's own wires."""
    return {_ADDRESS: door.address, _KEY: door.key.hex()}


class _Doors:
    """The doors of the running replicas, as the router of this process has them."""

    def __init__(self) -> None:
        self._doors: dict[str, Door] = {}
        self._on_change: OnDoors | None = None

    def watch(self, on_change: OnDoors) -> None:
        """Call back now and at each change, in the event loop that runs now: the router may have another one."""
        loop = asyncio.get_running_loop()

        def call_back(doors: Mapping[str, Door]) -> None:
            loop.call_soon_threadsafe(on_change, doors)

        self._on_change = call_back
        call_back(self._doors)

    def update(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the replicas: name → what it reports of itself."""
        doors = {
            name: Door(str(about[_ADDRESS]), bytes.fromhex(about[_KEY]))
            for name, about in replicas.items()
            if _ADDRESS in about
        }
        if doors != self._doors:
            self._doors = doors
            if self._on_change is not None:
                self._on_change(doors)


ENGINE_DOORS = _Doors()
"""Kept by the router of the handle of engines; a process has one at most."""


def update_doors(replicas: Mapping[str, Mapping[str, Any]]) -> None:
    """See `ENGINE_DOORS`. The router calls it by this name: of an object it would have a copy, too."""
    ENGINE_DOORS.update(replicas)
