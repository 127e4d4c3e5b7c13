"""Where engine replicas listen for agents, as the router of this process has heard of it.

Apart from `routing`, whose code Serve copies to each process that routes, with all that the module holds: what the
router notes there, nobody else would see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from forage_rollout.links.link import EngineAddress

_ADDRESS, _KEY = "link_address", "link_key"
OnAddresses = Callable[[Mapping[str, EngineAddress]], None]


def describe_address(address: EngineAddress) -> dict[str, str]:
    """What a replica reports of itself once; Serve's controller tells it every router, on Ray's own wires."""
    return {_ADDRESS: address.host_port, _KEY: address.key.hex()}


class EngineDirectory:
    """The addresses of the running replicas, as the router of this process has them."""

    def __init__(self) -> None:
        self._addresses: dict[str, EngineAddress] = {}
        self._on_change: OnAddresses | None = None

    def watch(self, on_change: OnAddresses) -> None:
        """Call back now and at each change, in the event loop that runs now: the router may have another one."""
        loop = asyncio.get_running_loop()

        def call_back(addresses: Mapping[str, EngineAddress]) -> None:
            loop.call_soon_threadsafe(on_change, addresses)

        self._on_change = call_back
        call_back(self._addresses)

    def update(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the replicas: name → what it reports of itself."""
        addresses = {
            name: EngineAddress(str(about[_ADDRESS]), bytes.fromhex(about[_KEY]))
            for name, about in replicas.items()
            if _ADDRESS in about
        }
        if addresses != self._addresses:
            self._addresses = addresses
            if self._on_change is not None:
                self._on_change(addresses)


ENGINE_DIRECTORY = EngineDirectory()
"""Kept by the router of the handle of engines; a process has one at most."""


def update_directory(replicas: Mapping[str, Mapping[str, Any]]) -> None:
    """See `ENGINE_DIRECTORY`. The router calls it by this name: of an object it would have a copy, too."""
    ENGINE_DIRECTORY.update(replicas)
