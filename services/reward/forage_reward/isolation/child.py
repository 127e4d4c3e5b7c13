"""A child process that answers frames of bytes, one at a time: the wall around code that may hang, crash or swell.

A frame is a length (4 bytes, little endian) and as many bytes; they are serialised protobuf messages, never pickles.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from forage_common.errors import ForageError

_LENGTH = struct.Struct("<I")
_ORPHAN_CHECK_S = 1.0
START_TIMEOUT_S = 60.0


class ChildTimeoutError(ForageError):
    """No answer in time. The child is in an unknown state: kill it."""


class ChildDiedError(ForageError):
    """The child has ended; the message says how."""


class Child:
    """`python -m <module> <descriptor> <arguments…>` in a session of its own, at the other end of a socket.

    Not thread-safe: one call at a time.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # Its own session: an interrupt on the terminal is for the service, which then drains its children.
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def call(self, request: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for the answer.

        Raises:
            ChildTimeoutError: no answer within `timeout_s`.
            ChildDiedError: it ended before it answered.
        """
        self.send(request, timeout_s)
        return self.receive(timeout_s)

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Raises: as `call`."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except TimeoutError:
            raise ChildTimeoutError(f"took no request within {timeout_s:g} s") from None
        except OSError:
            raise ChildDiedError(self._ending()) from None

    def receive(self, timeout_s: float) -> bytes:
        """Raises: as `call`."""
        deadline = time.monotonic() + timeout_s
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
            return self._exactly(length, deadline)
        except TimeoutError:
            raise ChildTimeoutError(f"no answer within {timeout_s:g} s") from None
        except OSError:
            raise ChildDiedError(self._ending()) from None

    def kill(self) -> None:
        """End it and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and so has its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._socket.close()

    def hang_up(self) -> None:
        """Close the connection, at which a well-behaved child ends."""
        self._socket.close()

    def _exactly(self, length: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while length:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(min(length, 1 << 20))
            if not part:
                raise ConnectionResetError
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _ending(self) -> str:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Parent:
    """The child's end of the connection."""

    def __init__(self, descriptor: int) -> None:
        self._file = socket.socket(fileno=descriptor).makefile("rwb")
        threading.Thread(target=_end_with, args=(os.getppid(),), name="orphan", daemon=True).start()

    def receive(self) -> bytes | None:
        """The next frame; None when the parent has hung up."""
        head = self._file.read(_LENGTH.size)
        return self._file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None

    def send(self, frame: bytes) -> None:
        self._file.write(_LENGTH.pack(len(frame)) + frame)
        self._file.flush()


def _end_with(parent: int) -> None:
    """A parent that was killed hangs up, but code that hangs would never read that."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os._exit(1)
