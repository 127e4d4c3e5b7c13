"""`python direct_trainer.py OPTIONS`: a sender of the direct transport, which obeys lines of JSON.

OPTIONS: arguments of `DirectSender` in JSON. {"offer": {digest: path}} changes what is sent; {"gpu": …} makes it claim
that GPU; {"count": true} asks for the threads, files and sockets of the process, {"outcomes": true} for the number of
transfers by outcome and backend. The first line that it prints is the port.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from forage_runtime.telemetry.logs import configure_logs
from forage_weights.direct_sender import DirectSender


def main() -> None:
    """Obey the lines until the input ends, then close the sender."""
    configure_logs("trainer")
    outcomes: Counter[str] = Counter()

    def count(outcome: str, backend: str, size: int) -> None:
        outcomes[f"{outcome} {backend}".strip()] += 1

    sender = DirectSender("127.0.0.1:0", count=count, **json.loads(sys.argv[1]))
    write_line({"port": sender.port})
    for line in sys.stdin:
        order = json.loads(line)
        if "offer" in order:
            sender.offer({digest: Path(path) for digest, path in order["offer"].items()})
        if "gpu" in order:
            sender._gpu = order["gpu"]
        write_line(dict(outcomes) if "outcomes" in order else count_resources(sender))
    sender.close()
    write_line(count_resources(sender))


def count_resources(sender: DirectSender) -> dict[str, int]:
    """Threads, and open files with sockets, of this process, and the transfers that are not over."""
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return {"threads": threads, "files": files, "running": sender.count_running()}


def write_line(answer: dict[str, Any]) -> None:
    """Write an answer, one line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
