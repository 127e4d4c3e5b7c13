"""A child process that answers frames of bytes, one at a time: it isolates code that may hang, crash or exhaust memory.

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
from collections.abc import Iterator, Mapping, Sequence

from forage_common.errors import ForageError, UserError
from forage_common.telemetry.stacks import write_stacks_on_signal

_LENGTH = struct.Struct("<I")
_ORPHAN_CHECK_S = 1.0
START_TIMEOUT_S = 60.0


class ChildError(ForageError):
    """The child gave no answer."""


class ChildTimeoutError(ChildError):
    """No answer in time. The child is in an unknown state: kill it."""


class ChildDiedError(ChildError):
    """The child has ended; the message says how."""


class Child:
    """`python -m <module> <descriptor> <arguments…>` in its own session, connected by a socket pair.

    Not thread-safe: one call at a time. `first_frame` is sent at the start where it is not empty.

    Raises:
        ChildError: the child did not take the first frame.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        first_frame: bytes = b"",
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # In its own session, so that an interrupt on the terminal reaches only the service, which then drains it.
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        if first_frame:
            try:
                self.send(first_frame, START_TIMEOUT_S)
            except ChildError:
                self.kill()
                raise

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_until_ready(self) -> Child:
        """Wait for the first frame: empty when the child is ready, otherwise the reason why it cannot work.

        Raises:
            ChildError, UserError: the child did not start; it is killed.
        """
        try:
            # Not limited by a caller's deadline: with short deadlines no child would ever become ready.
            if problem := self.receive(START_TIMEOUT_S).decode():
                raise UserError(problem)
        except (ChildError, UserError):
            self.kill()
            raise
        return self

    def call(self, request: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for the answer.

        Raises:
            ChildTimeoutError: no answer within `timeout_s`.
            ChildDiedError: it ended before it answered.
        """
        self.send(request, timeout_s)
        return self.receive(timeout_s)

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Send a frame. Raises as `call` does."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except TimeoutError:
            raise ChildTimeoutError(f"took no request within {timeout_s:g} s") from None
        except OSError:
            raise ChildDiedError(self._describe_end()) from None

    def receive(self, timeout_s: float) -> bytes:
        """Wait for a frame. Raises as `call` does."""
        deadline = time.monotonic() + timeout_s
        try:
            (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size, deadline))
            return self._receive_exactly(length, deadline)
        except TimeoutError:
            raise ChildTimeoutError(f"no answer within {timeout_s:g} s") from None
        except OSError:
            raise ChildDiedError(self._describe_end()) from None

    def kill(self) -> None:
        """Kill the child and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and so has its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()  # wait: it was killed
        self._socket.close()

    def hang_up(self) -> None:
        """Close the connection; a child that works then ends by itself."""
        self._socket.close()

    def _receive_exactly(self, length: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while length:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(min(length, 1 << 20))
            if not part:
                raise ConnectionResetError
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _describe_end(self) -> str:
        try:
            code = self.process.wait(1.0)  # wait: has a time limit
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class ParentConnection:
    """The child's end of the connection. Ends the process when the parent has died."""

    def __init__(self, descriptor: int) -> None:
        write_stacks_on_signal()
        self._file = socket.socket(fileno=descriptor).makefile("rwb")
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), name="orphan", daemon=True).start()

    def receive(self) -> bytes | None:
        """Wait for the next frame; None when the parent has closed the connection."""
        head = self._file.read(_LENGTH.size)
        return self._file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None

    def send(self, frame: bytes) -> None:
        self._file.write(_LENGTH.pack(len(frame)) + frame)
        self._file.flush()

    @contextlib.contextmanager
    def report_start(self) -> Iterator[None]:
        """Answer `Child.wait_until_ready` after a block; a UserError in it is the problem, and ends this process."""
        try:
            yield
        except UserError as error:
            self.send(str(error).encode(errors="replace"))
            sys.exit(error.exit_code)
        self.send(b"")


def _exit_with_parent(parent: int) -> None:
    # A killed parent closes the connection, but code that hangs never reads from it.
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)  # wait: pause between two looks
    os._exit(1)
