"""`python -m forage_reward.serve.worker FD FOLDER INDEX COUNT`: one of several processes that serve the same port.

The first frame holds the settings as YAML. It reports when it serves, or why it cannot, with exit code 2. When the
supervisor closes the connection, the worker finishes its calls and ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import yaml

from forage_reward.serve.peer_workers import WorkerAddress
from forage_reward.serve.server import Server
from forage_runtime.settings import Settings
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.logs import configure_logs, get_logger
from forage_sandbox.child import ParentConnection


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor ends its workers
    configure_logs("reward")
    parent = ParentConnection(int(sys.argv[1]))
    address = WorkerAddress(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    settings = Settings.model_validate(yaml.safe_load(parent.receive() or b""))
    tracing.start(settings, "reward")
    with parent.report_start():
        server = Server(settings, address).listen()
    get_logger().info("worker_serving", pid=os.getpid())
    while parent.receive() is not None:
        pass
    server.drain()
    tracing.stop()


if __name__ == "__main__":
    main()
