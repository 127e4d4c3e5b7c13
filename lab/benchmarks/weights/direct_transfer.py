"""The direct transport on this machine: from one sender to several receivers, against a copy and a plain socket.

`python direct_transfer.py` (in the trainer's environment) prints a table and one line of JSON.

- copy: the same bytes, once, within the memory of a process.
- socket: one connection a receiver, the sender's bytes in memory, received into memory: nothing is read or written.
- direct: what engines do: from files, into files, the rendezvous included. Files are in memory (/dev/shm).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forage_runtime.telemetry.logs import configure_logs
from forage_weights.direct_sender import PIECE_BYTES, DirectSender

_REPOSITORY = Path(__file__).resolve().parents[3]
_DIGEST = "measured"
_SINK = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as source:
    size = int(sys.argv[2])
    view = memoryview(bytearray(size))
    source.sendall(b"?")
    while view:
        view = view[source.recv_into(view):]
    source.sendall(b"!")
"""


def measure_copy(size: int) -> float:
    """Seconds to copy so many bytes within memory that was used before."""
    source, target = bytearray(size), bytearray(size)
    source[:] = target  # touches both
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began


def measure_socket(size: int, receivers: int) -> float:
    """Seconds until all receivers have so many bytes, each through a connection of its own."""
    data = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", _SINK, str(server.getsockname()[1]), str(size)]
        sinks = [subprocess.Popen(command) for _ in range(receivers)]
        connections = [server.accept()[0] for _ in sinks]
        for connection in connections:
            connection.recv(1)

        def send(connection: socket.socket) -> None:
            connection.sendall(data)
            connection.recv(1)

        began = time.perf_counter()
        threads = [threading.Thread(target=send, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
    for connection, sink in zip(connections, sinks, strict=True):
        connection.close()
        sink.wait()
    return seconds


def measure_direct(size: int, receivers: int, piece_bytes: int = PIECE_BYTES, rounds: int = 3) -> list[float]:
    """Seconds until all receivers have a file of so many bytes, in each of several rounds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, _start_engines(receivers) as engines:
        source = Path(folder) / "source"
        block = os.urandom(1 << 20)
        with source.open("wb") as out:
            for begin in range(0, size, len(block)):
                out.write(block[: size - begin])
        sender = DirectSender("127.0.0.1:0", piece_bytes)
        sender.offer({_DIGEST: source})
        seconds = []
        for _ in range(rounds + 1):  # the first one, in which memory is new to everybody, does not count
            with tempfile.TemporaryDirectory(dir=folder) as targets:
                began = time.perf_counter()
                for number, engine in enumerate(engines):
                    target = Path(targets) / str(number)
                    target.mkdir()
                    order = {"port": sender.port, "folder": str(target), "files": [["w", _DIGEST, size]]}
                    assert engine.stdin is not None
                    engine.stdin.write(json.dumps(order) + "\n")
                    engine.stdin.flush()
                for engine in engines:
                    assert engine.stdout is not None
                    answer = json.loads(engine.stdout.readline())
                    if answer["failure"]:
                        raise RuntimeError(answer["failure"])
                seconds.append(time.perf_counter() - began)
        sender.close()
    return seconds[1:]


@contextmanager
def _start_engines(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    command = [
        str(_REPOSITORY / ".venvs/rollout/bin/python"),
        str(_REPOSITORY / "tests/support/direct_engine.py"),
        "{}",
    ]
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        for _ in range(count)
    ]
    for engine in engines:
        assert engine.stdout is not None
        engine.stdout.readline()
    yield engines
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.close()
        engine.wait()


def main() -> None:
    """Measure every size with every number of receivers."""
    configure_logs("benchmark", "WARNING")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[270, 2000])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--pieces", type=int, nargs="+", default=[PIECE_BYTES >> 20], help="MiB of a piece")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lines = []
    for megabytes in options.megabytes:
        size = megabytes * 10**6
        copied = min(measure_copy(size) for _ in range(options.rounds))
        for receivers in options.receivers:
            through_socket = min(measure_socket(size, receivers) for _ in range(options.rounds))
            for piece in options.pieces:
                direct = min(measure_direct(size, receivers, piece << 20, options.rounds))
                lines.append(
                    {
                        "megabytes": megabytes,
                        "receivers": receivers,
                        "piece_mib": piece,
                        "copy_s": round(copied, 3),
                        "socket_s": round(through_socket, 3),
                        "direct_s": round(direct, 3),
                        "direct_over_socket": round(direct / through_socket, 2),
                    }
                )
                if len(lines) == 1:
                    sys.stdout.write("  ".join(f"{name:>10}" for name in lines[0]) + "\n")
                sys.stdout.write("  ".join(f"{value:>10}" for value in lines[-1].values()) + "\n")
                sys.stdout.flush()
    sys.stdout.write(json.dumps({"direct_transfers": lines}) + "\n")


if __name__ == "__main__":
    main()
