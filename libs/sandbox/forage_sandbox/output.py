"""What user code prints: passed on to stderr, with an end, and without the power to move a terminal's cursor."""

from __future__ import annotations

import sys
import threading
import time

LIMIT_BYTES = 64 * 1024
"""Printed by one process within a minute; the rest is dropped."""
_WINDOW_S = 60.0


class Output:
    """Reads a pipe to its end, on its own thread.

    Args:
        name: what each line begins with.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        self._left = LIMIT_BYTES
        self._dropped = 0
        self._begin = time.monotonic()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def _run(self) -> None:
        rest = b""
        with open(self._descriptor, "rb", buffering=0) as pipe:
            while part := pipe.read(65536):
                *lines, rest = (rest + self._admit(part)).split(b"\n")
                if len(rest) > LIMIT_BYTES:  # a line without end
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._print(line)
        if rest:
            self._print(rest)

    def _admit(self, part: bytes) -> bytes:
        if time.monotonic() - self._begin >= _WINDOW_S:
            if self._dropped:
                self._print(f"… {self._dropped} bytes more were printed, and dropped".encode())
            self._begin, self._left, self._dropped = time.monotonic(), LIMIT_BYTES, 0
        kept = part[: self._left]
        if len(kept) < len(part) and not self._dropped:
            self._print(f"… printed {LIMIT_BYTES // 1024} KiB within a minute: more is dropped".encode())
        self._left -= len(kept)
        self._dropped += len(part) - len(kept)
        return kept

    def _print(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        safe = "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)
        sys.stderr.write(f"{self._name}: {safe}\n")
