"""`python -m forage_reward.serve.worker FD FOLDER INDEX COUNT`: one of several processes that serve the same port.

The first frame holds the settings, as YAML; it is answered with "" when it serves, or with a sentence and exit
code 2. When the supervisor hangs up, the worker finishes its calls and ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import yaml

from forage_common.errors import UserError
from forage_common.settings import Settings
from forage_common.telemetry import tracing
from forage_common.telemetry.logs import configure_logs, get_logger
from forage_reward.isolation.child import Parent
from forage_reward.serve.peer_workers import Place
from forage_reward.serve.server import Server


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor says when
    configure_logs("reward")
    parent = Parent(int(sys.argv[1]))
    place = Place(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    settings = Settings.model_validate(yaml.safe_load(parent.receive() or b""))
    tracing.start(settings, "reward")
    try:
        server = Server(settings, place).listen()
    except UserError as error:
        parent.send(str(error).encode(errors="replace"))
        sys.exit(error.exit_code)
    parent.send(b"")
    get_logger().info("worker_serving", pid=os.getpid())
    while parent.receive() is not None:
        pass
    server.drain()
    tracing.stop()


if __name__ == "__main__":
    main()
