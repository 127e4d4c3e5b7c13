"""What an error of confined code means, and which setting would open what it wanted."""

from __future__ import annotations

import errno
import os
import socket

from forage_sandbox.confinement import Confinement
from forage_sandbox.seccomp import NO_NETWORK

_DEPTH = 10


def explain(error: BaseException, confinement: Confinement) -> str:
    """A clause that follows the error's own message; empty where the confinement has nothing to do with it."""
    if not (confinement.landlock or confinement.seccomp):
        return ""
    current: BaseException | None = error
    for _ in range(_DEPTH):
        if current is None:
            break
        if clause := _explain_one(current, confinement):
            return f"; {clause}"
        current = current.__cause__ or current.__context__
    return ""


def _explain_one(error: BaseException, confinement: Confinement) -> str:
    setting = confinement.setting
    if isinstance(error, socket.gaierror) and not confinement.network:
        return f"user code has no network: {setting}.network=true opens it"
    if not isinstance(error, PermissionError):
        return ""
    file = error.filename
    if error.errno == NO_NETWORK and file is None:
        if confinement.network:
            return "user code has no sockets but those of TCP and UDP"
        return f"user code has no network: {setting}.network=true opens it"
    if error.errno == errno.EACCES:
        path = os.path.abspath(os.fsdecode(file)) if isinstance(file, str | bytes) else file
        return f"user code may open no other files: {setting}.read=[{path}] opens it to read, {setting}.write to change"
    if error.errno == errno.EPERM and not confinement.programs:
        return (
            "user code may start no programs or processes, signal no others, and change no owners or modes of files:"
            f" {setting}.programs=true opens the first"
        )
    return (
        "user code may signal no others, and change no owners or modes of files" if error.errno == errno.EPERM else ""
    )
