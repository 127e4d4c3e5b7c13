"""A child process that answers frames of bytes, one at a time: it isolates code that may hang, crash or exhaust memory.

A frame is a length (4 bytes, little endian) and as many bytes; they are serialised protobuf messages, never pickles.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path

from forage_runtime.errors import ForageError, UserError
from forage_runtime.telemetry.stacks import write_stacks_on_signal
from forage_sandbox.child_watch import Watched, watch
from forage_sandbox.confinement import Confinement, ConfinementError, build_environment, confine
from forage_sandbox.output import Output

_LENGTH = struct.Struct("<I")
_ORPHAN_CHECK_S = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
START_TIMEOUT_S = 60.0
_FOLDER = "forage-user-"
_LONGEST_PROBLEM = 10_000
MAX_ANSWER_BYTES = 64 * 2**20
"""Of a confined child: code that is not trusted must not fill the memory of its parent."""

# Confined children end with the thread that started them, so that thread must live as long as the process.
_starter = ThreadPoolExecutor(1, "starter")


class ChildError(ForageError):
    """The child gave no answer."""


class ChildTimeoutError(ChildError):
    """No answer in time. The child is in an unknown state: kill it."""


class ChildDiedError(ChildError):
    """The child has ended; the message says how."""


class Child:
    """`python -m <module> <descriptor> <arguments…>` in its own session, connected by a socket pair.

    Not thread-safe: one call at a time. `first_frame` is sent at the start where it is not empty.

    Args:
        environment: further variables.
        confinement: what it may do, where it runs user code; it confines itself before it loads any. Then it gets few
            variables, a temporary folder of its own, no input, and what it prints goes to stderr within limits.

    Raises:
        ChildError: the child did not take the first frame.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        first_frame: bytes = b"",
        confinement: Confinement | None = None,
    ) -> None:
        self._socket, theirs = socket.socketpair()
        self._folder: Path | None = None
        self._watched: Watched | None = None
        self._stopped_because = ""
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            if confinement is None or not confinement.is_on:
                command += [] if confinement is None else [confinement.to_json()]
                # In its own session, so that an interrupt on the terminal reaches only the service, which then drains.
                self.process = subprocess.Popen(
                    [*command, *arguments],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
            else:
                self._start_confined(command, arguments, theirs.fileno(), confinement)
        if first_frame:
            try:
                self.send(first_frame, START_TIMEOUT_S)
            except ChildError:
                self.kill()
                raise

    def _start_confined(
        self, command: Sequence[str], arguments: Sequence[str], descriptor: int, confinement: Confinement
    ) -> None:
        sweep_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        temporary = str(self._folder)
        confinement = dataclasses.replace(confinement, temporary=temporary)
        reading, writing = os.pipe()
        try:
            self.process = _starter.submit(
                subprocess.Popen,
                [*command, confinement.to_json(), *arguments],
                pass_fds=[descriptor],
                env=build_environment(os.environ, temporary),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            ).result()
        except BaseException:
            os.close(reading)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(writing)
        Output(reading, confinement.setting)
        self._watched = watch(Watched(self.process.pid, self._folder, confinement.memory_mib, self._stop))

    def _stop(self, reason: str) -> None:
        """Kill it because of what it does; who calls it next learns why."""
        self._stopped_because = reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def take_socket(self) -> socket.socket:
        """Its end of the connection, for a caller that has many calls at a time."""
        return self._socket

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """For the time of a call, in which it may use the processor."""
        watched = self._watched
        if watched is None:
            yield
            return
        watched.begin_call()
        try:
            yield
        finally:
            watched.end_call()

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
            if problem := self.receive(START_TIMEOUT_S):
                raise UserError(problem.decode(errors="replace")[:_LONGEST_PROBLEM])
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
        with self.working():
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
            raise ChildDiedError(self.describe_end()) from None

    def receive(self, timeout_s: float) -> bytes:
        """Wait for a frame. Raises as `call` does."""
        deadline = time.monotonic() + timeout_s
        try:
            (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size, deadline))
            if self._watched is not None and length > MAX_ANSWER_BYTES:
                raise ChildDiedError(f"gave an answer of {length} bytes, allowed are {MAX_ANSWER_BYTES}")
            return self._receive_exactly(length, deadline)
        except TimeoutError:
            raise ChildTimeoutError(f"no answer within {timeout_s:g} s") from None
        except OSError:
            raise ChildDiedError(self.describe_end()) from None

    def kill(self) -> None:
        """Kill the child and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and so has its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()  # wait: it was killed
        self._socket.close()
        self._watched = None
        if self._folder is not None:
            remove_folder(self._folder)

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

    def describe_end(self) -> str:
        """How it ended, for people."""
        if self._stopped_because:
            return f"was stopped: {self._stopped_because}"
        try:
            code = self.process.wait(1.0)  # wait: has a time limit
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        known = {int(number): number.name for number in signal.Signals}
        return f"was killed by {known.get(-code, f'signal {-code}')}"


class ParentConnection:
    """The child's end of the connection. Ends the process when the parent has died.

    Args:
        confinement: that which the parent gave; from here on it holds.
    """

    def __init__(self, descriptor: int, confinement: Confinement | None = None) -> None:
        write_stacks_on_signal()
        self._problem = "" if confinement is None else _confine(confinement)
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rwb")
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), name="orphan", daemon=True).start()

    def take_socket(self) -> socket.socket:
        """The connection, for a child that answers several calls at a time; `receive` and `send` end with it."""
        return self._socket

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
            if self._problem:
                raise UserError(self._problem)
            yield
        except UserError as error:
            self.send(str(error).encode(errors="replace"))
            sys.exit(error.exit_code)
        self.send(b"")


def _confine(confinement: Confinement) -> str:
    """Confine this process; returns why it cannot be."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # else what it starts could leave the watch's sight
        if os.getppid() != parent:  # it died before that
            os._exit(1)
    try:
        confine(confinement)
    except ConfinementError as error:
        return str(error)
    return ""


@cache
def sweep_folders() -> None:
    """Remove, once, the temporary folders of children whose parents were killed and could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with contextlib.suppress(OSError, ValueError, OverflowError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and not _is_running(int(owner)):
                remove_folder(folder)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def remove_folder(folder: Path) -> None:
    """Remove a folder, however deep, also where its owner has made parts unreadable. Nothing may work in it any more.

    Deep folders are moved up before they are emptied: a path has a longest length, and Python's own functions a depth.
    """
    root, free = os.fspath(folder), count()
    todo = [root]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            os.chmod(parent, 0o700)
        for name, is_folder in _list_entries(parent):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                if not is_folder:
                    os.unlink(path)
                    continue
                if parent != root:
                    os.chmod(path, 0o700)
                    target = next(new for n in free if not os.path.lexists(new := os.path.join(root, str(n))))
                    os.rename(path, target)
                    path = target
                todo.append(path)
        with contextlib.suppress(OSError):
            os.rmdir(parent)  # the root is not empty yet
    with contextlib.suppress(OSError):
        os.rmdir(root)


def _list_entries(folder: str) -> list[tuple[str, bool]]:
    """Names in a folder, and whether they are folders; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []


def _exit_with_parent(parent: int) -> None:
    # A killed parent closes the connection, but code that hangs never reads from it.
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)  # wait: pause between two looks
    os._exit(1)
