"""GPUs that engines and trainer share: who uses their memory, and that it is never both."""

from __future__ import annotations

from simulation.world import Process, World

TRAINER = "trainer"


class SharedGpus:
    """Who uses the memory; the memory of a process that has ended is free.

    is_promised: whether nothing stands still for so long that others take it for dead.
    """

    def __init__(self, world: World, is_promised: bool) -> None:
        self._world = world
        self._is_promised = is_promised
        self._users: dict[str, Process] = {}

    def take(self, name: str) -> None:
        """Use memory from now on; `name` is that of an engine, or `TRAINER`."""
        process = self._world.process
        assert process is not None
        others = [
            user for user, owner in self._users.items() if owner.is_alive and user != name and TRAINER in (user, name)
        ]
        if others and self._is_promised:
            self._world.failures.append(f"{name} takes memory of GPUs that {', '.join(sorted(others))} still uses")
        self._users[name] = process

    def free(self, name: str) -> None:
        """Use none from now on."""
        self._users.pop(name, None)
