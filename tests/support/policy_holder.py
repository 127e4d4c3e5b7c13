"""A process that holds policies of a cache: an engine to the cache's other processes.

`python policy_holder.py [INSTANT SIGNAL]`: where an instant of its work is named, it sends itself the signal there.

Reads a line for each policy, `CACHE LIMIT_S POLICY` with the announcement as JSON, and holds it until the next line;
prints `held` and its folder, or the error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import json_format

from forage_proto.v1.trajectory_pb2 import Policy
from forage_weights import cache, delta
from forage_weights.announcement import PolicyError
from forage_weights.cache import PolicyCache

_patching = vars(delta)["os"] = SimpleNamespace(**vars(os))  # its own: other modules write files, too
INSTANTS: dict[str, tuple[Any, str]] = {
    "fetched": (PolicyCache, "_fetch"),
    "taken": (PolicyCache, "_take"),
    "half patched": (_patching, "pwrite"),
    "patched": (cache, "patch_files"),
    "verified": (cache, "_verify"),
}
"""Name → the function whose first call has just ended then."""


def interrupt_at(instant: str, number: int) -> None:
    """Send this process a signal at an instant of its work."""
    owner, name = INSTANTS[instant]
    real: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        result = real(*args, **named)
        os.kill(os.getpid(), number)
        return result

    setattr(owner, name, call)


def main() -> None:
    if len(sys.argv) > 1:
        interrupt_at(sys.argv[1], int(sys.argv[2]))
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            stack.close()
            folder, limit_s, announced = line.split(maxsplit=2)
            holder = PolicyCache(Path(folder), float(limit_s), float(limit_s))
            try:
                held = stack.enter_context(holder.hold(json_format.Parse(announced, Policy())))
                sys.stdout.write(f"held {held.files[0].parent}\n")
            except PolicyError as error:
                sys.stdout.write(f"{error}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
