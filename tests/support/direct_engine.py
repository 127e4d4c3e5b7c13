"""`python direct_engine.py STALL_S`: a receiver of the direct transport, which obeys lines of JSON.

{"port": …, "files": [[name, digest, bytes], …], "folder": …} receives files; printed are the seconds that it took and
why it failed, if it did.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from forage_common.v1.trajectory_pb2 import DirectSender, PolicyFile
from forage_rollout.weights.direct_receiver import DirectError, DirectReceiver


def main() -> None:
    """Obey the lines until the input ends."""
    receiver = DirectReceiver(float(sys.argv[1]))
    write_line({})
    for line in sys.stdin:
        order = json.loads(line)
        files = [PolicyFile(name=name, digest=digest, bytes=size) for name, digest, size in order["files"]]
        began, failure = time.perf_counter(), ""
        try:
            receiver.receive(DirectSender(host="127.0.0.1", port=order["port"]), files, Path(order["folder"]))
        except DirectError as error:
            failure = str(error)
        write_line({"seconds": time.perf_counter() - began, "failure": failure})


def write_line(answer: dict[str, Any]) -> None:
    """Write an answer, one line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
