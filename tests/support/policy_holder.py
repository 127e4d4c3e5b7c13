"""A process that holds policies of a cache: an engine to the cache's other processes.

Reads a line for each policy, `CACHE LIMIT_S POLICY` with the announcement as JSON, and holds it until the next line;
prints `held` and its folder, or the error.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from google.protobuf import json_format

from forage_common.v1.trajectory_pb2 import Policy
from forage_policies.announcement import PolicyError
from forage_policies.cache import PolicyCache


def main() -> None:
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            stack.close()
            folder, limit_s, announced = line.split(maxsplit=2)
            cache = PolicyCache(Path(folder), float(limit_s), float(limit_s))
            try:
                held = stack.enter_context(cache.hold(json_format.Parse(announced, Policy())))
                sys.stdout.write(f"held {held.files[0].parent}\n")
            except PolicyError as error:
                sys.stdout.write(f"{error}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
