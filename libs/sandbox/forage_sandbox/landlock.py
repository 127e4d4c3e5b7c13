"""Which files a process of user code may open: rules of Landlock, which nothing can take off."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_FIFO, _MAKE_SYM = 16, 32, 128, 256, 1024, 4096
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def find_version() -> tuple[int, str]:
    """The version of Landlock that this kernel has, and why it has none (0)."""
    if sys.platform != "linux":
        return 0, f"{sys.platform} has no Landlock"
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION_FLAG), ""
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return 0, "Landlock is switched off on this kernel: add landlock to its lsm= option"
        if error.errno == errno.ENOSYS:
            return 0, "this kernel has no Landlock: Linux 5.13 or later has it"
        return 0, f"the container runtime refuses Landlock ({error.strerror}): use its default seccomp profile"


def restrict(version: int, read: Iterable[str], write: Iterable[str], *, network: bool, programs: bool) -> None:
    """Let this process, and all that it starts, open these files and folders alone. Call it before a thread starts.

    Paths that do not exist are left out.

    Raises:
        OSError: the kernel refused.
    """
    handled = (1 << 13) - 1
    handled |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled |= _IOCTL_DEV if version >= 5 else 0
    tcp = 0 if network or version < 4 else _BIND_TCP | _CONNECT_TCP
    scoped = _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if version >= 6 else 0
    attributes = _RulesetAttributes(handled, tcp, scoped)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    try:
        for paths, rights in ((read, _READ), (write, _WRITE | _REFER | _TRUNCATE)):
            for path in paths:
                _allow(ruleset, path, (rights | (_EXECUTE if programs else 0)) & handled)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(*map(ctypes.c_ulong, (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, descriptor)
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
