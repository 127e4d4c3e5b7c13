"""What a process of user code may ask of the kernel: a filter of system calls (seccomp), which nothing can take off.

Refused are new sockets, programs, signals to others, other processes' memory, changes of files' owners and modes, and
the parts of the kernel that no Python code needs. Refusals are errors that Python raises: PermissionError with errno
`NO_NETWORK` for sockets, with EPERM for the rest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

from forage_sandbox.syscalls import LAST_KNOWN, NUMBERS

NO_NETWORK = errno.EACCES
"""The error of what needs a network; others are EPERM, so that the two can be told apart."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LD, _JEQ, _JGE, _AND, _RET = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_GET_SECCOMP = 38, 22, 21
_FILTER_MODE = 2

_AF_INET, _AF_INET6, _AF_NETLINK, _AF_UNIX = 2, 10, 16, 1
_SOCK_STREAM, _SOCK_RAW, _SOCK_TYPE = 1, 3, 0xF
_CLONE_THREAD, _CLONE_PARENT, _CLONE_NEW = 0x00010000, 0x00008000, 0x7E020080
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCLINUX = 0x8901, 0x8902, 0x5412, 0x541C
# They change files that are open for reading: attributes as of chattr, and for good with verity.
_SETFLAGS, _SETFLAGS_32, _SETXATTR, _ENABLE_VERITY = 0x40086602, 0x40046602, 0x401C5820, 0x40806685
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER = 1, 4, 36, 0x59616D61
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000

_NETWORK = ("bind", "connect", "listen", "accept", "accept4")
_PROGRAMS = ("fork", "vfork", "execve", "execveat")
_NEVER = (
    # leaving the group of processes that is killed, signals, and the memory and limits of others
    *("setsid", "setpgid", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"),
    *("pidfd_open", "pidfd_send_signal", "pidfd_getfd", "ptrace", "process_vm_readv", "process_vm_writev"),
    *("process_madvise", "process_mrelease", "kcmp", "sched_setscheduler", "sched_setparam", "sched_setattr"),
    *("setpriority", "ioprio_set", "migrate_pages", "move_pages"),
    # name spaces and mounts
    *("mount", "umount2", "pivot_root", "chroot", "setns", "unshare", "move_mount", "open_tree", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "statmount", "listmount"),
    # the kernel and the machine
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "bpf", "perf_event_open"),
    *("userfaultfd", "fanotify_init", "keyctl", "add_key", "request_key", "swapon", "swapoff", "reboot"),
    *("sethostname", "setdomainname", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "acct"),
    *("quotactl", "quotactl_fd", "syslog", "iopl", "ioperm", "vhangup", "personality", "modify_ldt"),
    # ways around a check of paths or of system calls
    *("open_by_handle_at", "name_to_handle_at", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    # memory that no limit counts
    *("memfd_create", "memfd_secret", "shmget", "shmat", "msgget", "semget", "mq_open", "mq_unlink"),
    # other processes' queues, semaphores and segments, whose numbers can be guessed
    *("shmctl", "msgctl", "msgsnd", "msgrcv", "semctl", "semop", "semtimedop"),
    # owners, modes and times of files, which Landlock does not look at
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "setxattr", "lsetxattr"),
    *("fsetxattr", "removexattr", "lremovexattr", "fremovexattr", "setxattrat", "removexattrat"),
    *("utime", "utimes", "utimensat", "futimesat", "truncate"),
)


def explain_missing() -> str:
    """Why no filter can be set here; empty where one can."""
    if sys.platform != "linux":
        return f"{sys.platform} has no seccomp"
    if platform.machine() not in _ARCHITECTURES or sys.maxsize < 2**32:
        return f"the filter knows x86_64 and aarch64, not {platform.machine()}"
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_SECCOMP) < 0:
        return "this kernel was built without seccomp"
    return ""


def set_filter(*, network: bool, programs: bool) -> None:
    """Filter the system calls of this process and of all that it starts, for good. Call it before a thread starts.

    Raises:
        OSError: the kernel refused.
    """
    program = _build_program(network, programs)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER_MODE, header, 0, 0)):
        if libc.prctl(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)):
            raise OSError(ctypes.get_errno(), f"the filter of system calls: {os.strerror(ctypes.get_errno())}")


class _Program:
    """A BPF program that looks at one system call after another; what none of its rules refuses is allowed."""

    def __init__(self, column: int, architecture: int) -> None:
        self._column = column
        self.code: list[tuple[int, int, int, int]] = [
            (_LD, 0, 0, _ARCHITECTURE_AT),
            (_JEQ, 1, 0, architecture),
            (_RET, 0, 0, _KILL),
            (_LD, 0, 0, _NUMBER_AT),
            (_JGE, 0, 1, _X32),
            (_RET, 0, 0, _ERRNO | errno.ENOSYS),
            (_JGE, 0, 1, LAST_KNOWN + 1),
            (_RET, 0, 0, _ERRNO | errno.ENOSYS),
        ]

    def refuse(self, name: str, error: int = errno.EPERM) -> None:
        """Refuse a system call."""
        self._add(name, [(_RET, 0, 0, _ERRNO | error)])

    def refuse_when(
        self, name: str, argument: int, values: Sequence[int], mask: int = 0xFFFFFFFF, error: int = errno.EPERM
    ) -> None:
        """Refuse a system call whose argument, by the bits of a mask, is one of the values."""
        checks = [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
        self._add(name, [*_load(argument, mask), *checks, (_JEQ, 1, 1, 0), (_RET, 0, 0, _ERRNO | error)])

    def refuse_unless(
        self, name: str, argument: int, values: Sequence[int], mask: int = 0xFFFFFFFF, error: int = errno.EPERM
    ) -> None:
        """Refuse a system call whose argument, by the bits of a mask, is none of the values."""
        checks = [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
        self._add(name, [*_load(argument, mask), *checks, (_RET, 0, 0, _ERRNO | error)])

    def refuse_raw_sockets(self) -> None:
        """Raw sockets are for the kernel's own tables alone: getaddrinfo asks those for the machine's addresses."""
        self._add(
            "socket",
            [
                *_load(0),
                (_JEQ, 5, 0, _AF_NETLINK),
                *_load(1, _SOCK_TYPE),
                (_JEQ, 1, 0, _SOCK_RAW),
                (_JEQ, 1, 1, 0),
                (_RET, 0, 0, _ERRNO | NO_NETWORK),
            ],
        )

    def _add(self, name: str, rule: list[tuple[int, int, int, int]]) -> None:
        number = NUMBERS[name][self._column]
        if number is not None:
            loaded = any(code == _LD for code, *_ in rule)
            rule = [*rule, (_LD, 0, 0, _NUMBER_AT)] if loaded else rule
            self.code += [(_JEQ, 0, len(rule), number), *rule]


def _load(argument: int, mask: int = 0xFFFFFFFF) -> list[tuple[int, int, int, int]]:
    """Load the lower half of an argument; the kernel reads no more of those that are looked at."""
    load = [(_LD, 0, 0, _ARGUMENTS_AT + 8 * argument)]
    return load if mask == 0xFFFFFFFF else [*load, (_AND, 0, 0, mask)]


def _build_program(network: bool, programs: bool) -> bytes:
    p = _Program(*_ARCHITECTURES[platform.machine()])
    for name in _NEVER:
        p.refuse(name)
    if network:
        p.refuse_unless("socket", 0, (_AF_INET, _AF_INET6, _AF_NETLINK), error=NO_NETWORK)
        p.refuse_raw_sockets()
    else:
        for name in ("socket", *_NETWORK):
            p.refuse(name, NO_NETWORK)
    # asyncio needs a pair of streams. Of a pair of datagram sockets each could send to any socket of the file system.
    p.refuse_unless("socketpair", 0, (_AF_UNIX,), error=NO_NETWORK)
    p.refuse_unless("socketpair", 1, (_SOCK_STREAM,), _SOCK_TYPE, error=NO_NETWORK)
    p.refuse("clone3", errno.ENOSYS)  # its flags are in memory; libc then calls clone
    if programs:
        # A sibling would be a child of the service, which the watch does not count.
        p.refuse_unless("clone", 0, (0,), _CLONE_NEW | _CLONE_PARENT)
    else:
        for name in _PROGRAMS:
            p.refuse(name)
        p.refuse_when("clone", 0, (0,), _CLONE_THREAD)
        own = os.getpid()
        p.refuse_unless("kill", 0, (own, 0))
        p.refuse_unless("tgkill", 0, (own,))
    p.refuse_unless("prlimit64", 0, (0,))
    p.refuse_unless("sched_setaffinity", 0, (0,))
    p.refuse_when("fcntl", 1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX))  # they would send signals to others
    p.refuse_when("ioctl", 1, (_FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCLINUX))
    p.refuse_when("ioctl", 1, (_SETFLAGS, _SETFLAGS_32, _SETXATTR, _ENABLE_VERITY))
    p.refuse_when("prctl", 0, (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER))
    # Before Linux 6.2 Landlock does not see that a file which is opened for reading is emptied.
    p.refuse_when("open", 1, (_O_TRUNC,), _O_TRUNC | _O_ACCMODE)
    p.refuse_when("openat", 2, (_O_TRUNC,), _O_TRUNC | _O_ACCMODE)
    p.refuse("openat2", errno.ENOSYS)  # its flags are in memory; nobody uses it without a way to do without
    p.code.append((_RET, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in p.code)
