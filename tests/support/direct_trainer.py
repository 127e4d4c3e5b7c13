"""`python direct_trainer.py STALL_S`: a sender of the direct transport, which obeys lines of JSON.

{"offer": {digest: path}} changes what is sent; {"count": true} asks for the threads, files and sockets of the process.
The first line that it prints is the port.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from forage_common.telemetry.logs import configure_logs
from forage_trainer.weights.direct_sender import DirectSender


def main() -> None:
    """Obey the lines until the input ends, then close the sender."""
    configure_logs("trainer")
    sender = DirectSender("127.0.0.1:0", stall_s=float(sys.argv[1]))
    write_line({"port": sender.port})
    for line in sys.stdin:
        order = json.loads(line)
        if "offer" in order:
            sender.offer({digest: Path(path) for digest, path in order["offer"].items()})
        write_line(count_resources())
    sender.close()
    write_line(count_resources())


def count_resources() -> dict[str, int]:
    """Threads, and open files with sockets, of this process."""
    return {"threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd"))}


def write_line(answer: dict[str, Any]) -> None:
    """Write an answer, one line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
