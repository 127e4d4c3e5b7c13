"""What code that wants out of its confinement would try; each attempt returns where it succeeds and raises otherwise.

This text is also the beginning of user rewards and environments, so it imports nothing of the project.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys

LIBC = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    """A system call by its number on x86_64, past Python's own checks."""
    LIBC.syscall.restype = ctypes.c_long
    result = LIBC.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def connect(family, kind, address):
    with socket.socket(family, kind) as client:
        client.connect(address)
        client.send(b"out")


def send_by_pair(address):
    with socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0] as mine:
        mine.sendto(b"out", address)


def connect_a_pair(address):
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.connect(address)


def read_link(target):
    link = os.path.join(os.environ["TMPDIR"], f"link{os.urandom(4).hex()}")
    os.symlink(target, link)
    with open(link) as file:
        return file.read()


def read_hard_link(target):
    link = os.path.join(os.environ["TMPDIR"], f"hard{os.urandom(4).hex()}")
    os.link(target, link)
    with open(link) as file:
        return file.read()


def read(path):
    with open(path) as file:
        return file.read()


def write(path, mode="a"):
    with open(path, mode) as file:
        file.write("out")


def empty_by_reading(path):
    os.close(os.open(path, os.O_RDONLY | os.O_TRUNC))


def move_in(path):
    os.rename(path, os.path.join(os.environ["TMPDIR"], "stolen"))


def fork():
    if os.fork() == 0:
        os._exit(0)


def find_variables(names):
    found = [name for name in names if name in os.environ]
    if not found:
        raise KeyError("no secret variable")


def find_descriptors(own):
    found = []
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.append(number)
    if len(found) <= own:
        raise OSError(f"only {found}")


def raise_limit():
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))


def lower_limit_of_parent():
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (64, 64))


def signal_by_descriptor():
    signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGTERM)


def own_a_descriptor():
    import fcntl

    mine, theirs = socket.socketpair()
    with mine, theirs:
        fcntl.fcntl(mine, fcntl.F_SETOWN, os.getppid())


ATTEMPTS = {
    "tcp": lambda t: connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(t["tcp"]))),
    "tcp6": lambda t: connect(socket.AF_INET6, socket.SOCK_STREAM, ("::1", int(t["tcp"]))),
    "udp": lambda t: connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", int(t["tcp"]))),
    "unix": lambda t: connect(socket.AF_UNIX, socket.SOCK_STREAM, t["unix"]),
    "abstract": lambda t: connect(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + t["abstract"]),
    "raw": lambda t: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
    "packet": lambda t: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close(),
    "netlink": lambda t: socket.socket(16, socket.SOCK_RAW, 0).close(),
    "vsock": lambda t: socket.socket(40, socket.SOCK_STREAM, 0).close(),
    "listen": lambda t: socket.create_server(("127.0.0.1", 0)).close(),
    "dns": lambda t: socket.getaddrinfo("forage.example", 80),
    "pair": lambda t: send_by_pair(t["datagrams"]),
    "stream_pair": lambda t: connect_a_pair(t["unix"]),
    "parent_environment": lambda t: read(f"/proc/{os.getppid()}/environ"),
    "parent_memory": lambda t: read(f"/proc/{os.getppid()}/mem"),
    "parent_root": lambda t: read(f"/proc/{os.getppid()}/root{t['secret']}"),
    "parent_memory_by_call": lambda t: call(310, os.getppid(), 0, 0, 0, 0, 0),
    "secret": lambda t: read(t["secret"]),
    "secret_by_link": lambda t: read_link(t["secret"]),
    "secret_by_hard_link": lambda t: read_hard_link(t["secret"]),
    "secret_by_root": lambda t: read("/proc/self/root" + t["secret"]),
    "secret_by_dots": lambda t: read(os.environ["TMPDIR"] + "/../" * 20 + t["secret"]),
    "secret_by_openat2": lambda t: call(437, -100, t["secret"].encode(), ctypes.create_string_buffer(24), 24),
    "list": lambda t: os.listdir(os.path.dirname(t["secret"])),
    "passwords": lambda t: read("/etc/shadow"),
    "move": lambda t: move_in(t["secret"]),
    "write": lambda t: write(t["secret"]),
    "create": lambda t: write(os.path.join(os.path.dirname(t["secret"]), "new"), "x"),
    "write_own_code": lambda t: write(__file__),
    "write_libraries": lambda t: write(os.__file__),
    "remove": lambda t: os.unlink(t["secret"]),
    "empty": lambda t: empty_by_reading(__file__),
    "truncate": lambda t: os.truncate(t["secret"], 0),
    "chmod": lambda t: os.chmod(t["secret"], 0o777),
    "fchmod": lambda t: os.chmod(__file__, 0o777),
    "touch": lambda t: os.utime(t["secret"]),
    "attribute": lambda t: os.setxattr(t["secret"], "user.out", b"out"),
    "device": lambda t: os.mknod(os.environ["TMPDIR"] + "/disk", 0o60600, os.makedev(8, 0)),
    "fork": lambda t: fork(),
    "fork_by_call": lambda t: call(57),
    "vfork_by_call": lambda t: call(58),
    "clone_by_call": lambda t: call(56, 17, 0, 0, 0, 0),
    "program": lambda t: subprocess.run(["/bin/true"]),
    "shell": lambda t: subprocess.run("true", shell=True, check=True),
    "spawn": lambda t: os.posix_spawn("/bin/true", ["true"], {}),
    "exec": lambda t: os.execv(sys.executable, [sys.executable, "-c", "pass"]),
    "session": lambda t: os.setsid(),
    "kill_parent": lambda t: os.kill(os.getppid(), signal.SIGTERM),
    "kill_all": lambda t: os.kill(-1, signal.SIGTERM),
    "kill_by_descriptor": lambda t: signal_by_descriptor(),
    "kill_thread": lambda t: call(200, os.getppid(), 15),
    "kill_by_queue": lambda t: call(129, os.getppid(), 15, ctypes.create_string_buffer(128)),
    "own_descriptor": lambda t: own_a_descriptor(),
    "trace_parent": lambda t: call(101, 16, os.getppid(), 0, 0),
    "priority_of_parent": lambda t: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
    "cores_of_parent": lambda t: os.sched_setaffinity(os.getppid(), {0}),
    "limit_of_parent": lambda t: lower_limit_of_parent(),
    "own_limit": lambda t: raise_limit(),
    "namespace": lambda t: call(272, 0x10000000),
    "mount": lambda t: call(165, b"none", t["folder"].encode(), b"tmpfs", 0, 0),
    "chroot": lambda t: os.chroot("/"),
    "keys": lambda t: call(250, 0, -1, 0),
    "bpf": lambda t: call(321, 0, ctypes.create_string_buffer(128), 128),
    "io_uring": lambda t: call(425, 8, ctypes.create_string_buffer(120)),
    "performance": lambda t: call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0),
    "memory_file": lambda t: os.memfd_create("x"),
    "shared_segment": lambda t: call(29, 0, 4096, 0o1600),
    "shared_memory": lambda t: write("/dev/shm/forage-out", "x"),
    "other_abi": lambda t: call(0x40000000 + 39),
    "future_call": lambda t: call(800),
    "variables": lambda t: find_variables(t["variables"].split(",")),
    "descriptors": lambda t: find_descriptors(int(t["own_descriptors"])),
}
