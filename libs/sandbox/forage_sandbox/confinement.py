"""The confinement of a process that runs user code: what it may read, write and ask for, set by the process itself."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import site
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forage_runtime.errors import ForageError
from forage_sandbox import landlock, seccomp

OPEN_FILES = 256
MAX_TASKS = 256
"""Threads of a process and of those that it started, together."""
TEMPORARY_MIB = 256
"""Size of a file in the process's temporary folder, and of the folder."""

_VARIABLES = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8", "PYTHONWARNINGS"),
    *("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE"),
)
_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/timezone", "/etc/mime.types"),
    *("/dev/urandom", "/dev/random", "/dev/zero", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)
_NAMES = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services"),
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates"),
)
_PROGRAMS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/share")
_CAPABILITIES_3 = 0x20080522


class ConfinementError(ForageError):
    """The kernel refused a protection that it has announced."""


@dataclass(frozen=True)
class Confinement:
    """What one process of user code may do.

    Attributes:
        setting: the section of its settings, such as reward.user.mine; its fields open what is closed.
        read, write: files and folders, besides Python's own and the temporary folder.
        memory_mib: beyond that of the interpreter.
        landlock, seccomp: as in `Support`.
        is_on: False: an ordinary process with a memory limit, as security.user_code=off asks for.
    """

    setting: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    network: bool = False
    programs: bool = False
    memory_mib: int = 1024
    landlock: int = 0
    seccomp: bool = False
    temporary: str = ""
    is_on: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Confinement:
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("read", "write")})


def build_environment(environment: Mapping[str, str], temporary: str) -> dict[str, str]:
    """The variables that user code gets: those by which Python and its libraries run, none with a secret."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _VARIABLES or name.startswith("LC_") or name.endswith("_NUM_THREADS")
    }
    # Unbuffered: what it prints before it is killed is the most interesting.
    return kept | {"HOME": temporary, "TMPDIR": temporary, "USER": "forage", "PYTHONUNBUFFERED": "1"}


def confine(confinement: Confinement) -> None:
    """Confine this process for good. Call it before the user's code is loaded and before a thread starts.

    Raises:
        ConfinementError: a protection cannot be set.
    """
    c = confinement
    if not c.is_on:
        return limit_memory(c.memory_mib * 2**20)
    if c.landlock or c.seccomp:
        _check_single_thread()
    _limit(c.memory_mib)
    if c.programs and sys.platform == "linux":
        _limit_processes()
    try:
        _drop_capabilities()
        if c.landlock:
            read = [*find_python_paths(), *_SYSTEM, *c.read]
            read += [*_NAMES] if c.network else []
            read += [*_PROGRAMS] if c.programs else []
            write = [c.temporary, *c.write, "/dev/null"]
            landlock.restrict(c.landlock, read, write, network=c.network, programs=c.programs)
        if c.seccomp:
            seccomp.set_filter(network=c.network, programs=c.programs)
    except OSError as error:
        raise ConfinementError(f"{c.setting} cannot be isolated ({error}): see security.user_code") from None


def find_python_paths() -> list[str]:
    """Folders of the interpreter, its libraries and installed packages; not the working directory."""
    here = os.path.realpath(os.getcwd())
    paths = {sys.base_prefix, sys.prefix, *site.getsitepackages(), *sysconfig.get_paths().values()}
    paths |= {path for path in sys.path if path and os.path.realpath(path) != here}
    return sorted(path for path in paths if path != "/")


def limit_memory(growth_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `growth_bytes`, and disable core dumps."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + growth_bytes, size + growth_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit(memory_mib: int) -> None:
    if sys.platform == "linux":
        limit_memory(memory_mib * 2**20)
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = [(resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_FSIZE, TEMPORARY_MIB * 2**20)]
    for kind, limit in limits:
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _limit_processes() -> None:
    """Let the user of this process have few more processes and threads than now. The kernel exempts root."""
    own, tasks = os.getuid(), 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == own:
                tasks += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = tasks + MAX_TASKS if hard == resource.RLIM_INFINITY else min(tasks + MAX_TASKS, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def _check_single_thread() -> None:
    # Both mechanisms hold for the calling thread and for what it starts; another thread would stay free.
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise ConfinementError(f"{threads} threads run before user code is isolated; expected one")


def _drop_capabilities() -> None:
    """Let root be a user like any other: its limits hold, and others' files and processes are closed."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(nothing)):
        raise OSError(ctypes.get_errno(), f"capabilities: {os.strerror(ctypes.get_errno())}")
