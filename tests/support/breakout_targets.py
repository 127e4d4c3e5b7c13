"""What lies outside of a confinement: sockets that listen, a secret file, a variable; and who has touched them."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

CODE = Path(__file__).with_name("breakout.py")
SECRET = "s3cret"


@dataclass
class Targets:
    """Attributes:
    params: for the user's code, to find what it is to reach.
    """

    params: dict[str, str]
    secret: Path
    _listeners: list[socket.socket]

    def was_touched(self) -> list[str]:
        """What has arrived, or has changed."""
        touched = []
        for listener in self._listeners:
            listener.setblocking(False)
            try:
                if listener.type == socket.SOCK_STREAM:
                    listener.accept()[0].close()
                else:
                    listener.recv(100)
                touched.append(str(listener.getsockname()))
            except BlockingIOError:
                continue
        if self.secret.read_text() != SECRET or oct(self.secret.stat().st_mode)[-3:] != "600":
            touched.append("the file")
        return touched + [name for name in os.listdir(self.secret.parent) if name != self.secret.name]


@contextmanager
def open_targets(folder: Path) -> Iterator[Targets]:
    """Open them; `folder` is made for the secret file."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="fg") as short:  # paths of sockets are short
        listeners = [
            stack.enter_context(socket.socket(family, kind))
            for family, kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_INET, socket.SOCK_DGRAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_DGRAM),
            )
        ]
        tcp, udp, unix, abstract, datagrams = listeners
        tcp.bind(("127.0.0.1", 0))
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        unix.bind(f"{short}/stream")
        abstract.bind(f"\0{short}")
        datagrams.bind(f"{short}/datagrams")
        for listener in (tcp, unix, abstract):
            listener.listen()
        folder.mkdir()
        secret = folder / "token"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        params = {
            "tcp": str(port),
            "unix": f"{short}/stream",
            "abstract": short,
            "datagrams": f"{short}/datagrams",
            "secret": str(secret),
            "folder": str(folder),
            "variables": "FORAGE__REDIS__PASSWORD,AWS_SECRET_ACCESS_KEY,MY_TOKEN",
            "own_descriptors": "1",
        }
        yield Targets(params, secret, listeners)
