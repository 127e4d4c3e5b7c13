"""The users of a server, and what each may do: the one table from which access lists are made.

A user's rights are commands and keys, and further commands for some keys alone (selectors). Functions need no list of
their own: the server checks each command of a function against the rights of its caller, so a function lets nobody do
more than its commands one by one. (An access list could name functions, `+fcall|NAME`, but Redis calls that form
deprecated, and names change with every upgrade.) Nobody but the administrator may bring Lua: EVAL, SCRIPT LOAD and
FUNCTION LOAD are refused to all others, as are all commands that Redis calls dangerous or of administration, except
INFO, which says how much memory is left. No user may use channels: Forage has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from forage_queue.streams.functions import list_commands


class Role(StrEnum):
    """Who uses a server. Reward and retriever do not."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    CLI = "cli"
    CONSOLE = "console"
    EXPORTER = "exporter"
    KEDA = "keda"
    ADMIN = "admin"
    """Loads functions and access lists; no service has its password."""


SERVICES = tuple(role for role in Role if role is not Role.ADMIN)

# Not CLIENT SETINFO, which Redis 7.0 does not know: clients go on without it.
_CONNECT = ("ping", "hello", "client|setname", "select")
# A client of a cluster asks for the owner of its keys.
_FIND_NODE = ("cluster|slots", "cluster|shards", "command")
_CONFIRM = ("wait",)
_CALL_READING = ("fcall_ro",)
_CALL = ("fcall", *_CALL_READING)


@dataclass(frozen=True)
class Grant:
    """Commands that a user may send for some keys alone: a selector of the access list.

    Attributes:
        keys: keys of the run, which it reads and changes.
        commands: those it sends itself, and those of the scripts that are not granted for all of its keys.
        scripts: those whose functions it calls.
    """

    keys: tuple[str, ...]
    commands: tuple[str, ...]
    scripts: tuple[str, ...]


@dataclass(frozen=True)
class Rights:
    """What one user may do.

    Attributes:
        commands: those it sends itself.
        scripts: those whose functions it calls; it may send their commands too.
        reads: keys of the run, as patterns.
        writes: keys that it also changes, with each of these commands.
        grants: keys that it also changes, with few commands.
    """

    commands: tuple[str, ...]
    scripts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()

    @property
    def common_commands(self) -> tuple[str, ...]:
        """Commands for all keys of the user."""
        return tuple(sorted({*self.commands, *(command for name in self.scripts for command in list_commands(name))}))


_ALL_KEYS = ("*",)
_PUBLISH = ("acquire_epoch", "publish")
RIGHTS: Mapping[Role, Rights] = {
    # It issues, acknowledges and publishes.
    Role.TRAINER: Rights(
        commands=(
            *(*_CONNECT, *_FIND_NODE, *_CONFIRM, *_CALL, "info"),
            *("exists", "get", "hget", "hgetall", "memory|usage"),
            *("xlen", "xpending", "xrange", "xreadgroup"),
        ),
        scripts=(
            *("acknowledge", "acquire_epoch", "close_stream", "create_group", "discard", "find_absent", "issue"),
            *("list_stored", "offer_payloads", "prune", "publish", "read_replicas", "reclaim", "reject"),
            *("replace_shift", "set_shift", "touch"),
        ),
        writes=_ALL_KEYS,
    ),
    # It works on prompts and says what it serves. It cannot publish a policy, nor change the ledger.
    Role.ROLLOUT: Rights(
        commands=(
            *(*_CONNECT, *_FIND_NODE, *_CONFIRM, *_CALL, "info"),
            *("get", "hget", "memory|usage", "set"),
            *("xautoclaim", "xclaim", "xlen", "xread", "xreadgroup"),
        ),
        scripts=(
            *("acknowledge_policy", "create_group", "declare_environments", "finish", "read_replicas", "reject"),
            *("replace_shift", "touch"),
        ),
        reads=_ALL_KEYS,
        writes=(
            *("prompts", "trajectories", "validation-*", "stored:*", "finished", "rejected"),
            *("replicas", "alive", "served", "announced", "shift"),
            *("environments", "dtype", "writes"),
        ),
    ),
    # It looks, and `forage up` and `forage ask` publish the policy that they serve. Of the streams of prompts and
    # trajectories it creates the groups, and changes nothing in them.
    Role.CLI: Rights(
        commands=(
            *(*_CONNECT, *_FIND_NODE, *_CONFIRM, *_CALL_READING, "info"),
            *("exists", "get", "hget", "hgetall", "hlen", "memory|usage", "xlen"),
        ),
        scripts=("read_replicas",),
        reads=_ALL_KEYS,
        grants=(
            Grant(("epoch", "policy", "announced", "served"), ("fcall", "hset", "set", "xadd"), _PUBLISH),
            Grant(("prompts", "trajectories"), ("fcall", "xgroup|create"), ("create_group",)),
            Grant(("writes",), ("fcall", "incr"), ("touch",)),
        ),
    ),
    Role.CONSOLE: Rights(
        commands=(*_CONNECT, *_FIND_NODE, *_CALL_READING, "info", "get", "hget", "memory|usage", "xlen"),
        scripts=("read_replicas",),
        reads=_ALL_KEYS,
    ),
    # redis_exporter with --check-streams. SLOWLOG, LATENCY and CONFIG are of administration: it goes on without them.
    Role.EXPORTER: Rights(
        commands=(
            *(*_CONNECT, "info", "scan", "type", "memory|usage"),
            *("xinfo|stream", "xinfo|groups", "xinfo|consumers", "xlen"),
        ),
        reads=_ALL_KEYS,
    ),
    # The trigger redis-streams with streamLength.
    Role.KEDA: Rights(commands=(*_CONNECT, "xlen"), reads=("prompts",)),
}


# Nobody can log in as default. Its rights stay: Redis reads its append-only file as this user, and where it has none
# Redis 7.0 skips every transaction of the file, which are the groups of a run.
DEFAULT_OFF = "user default off resetpass ~* &* +@all"


def hash_password(password: str) -> str:
    """A password as access lists have it."""
    return hashlib.sha256(password.encode()).hexdigest()


def name_user(role: Role, prefix: str = "forage") -> str:
    """The name of a role's user: `forage-trainer`."""
    return f"{prefix}-{role}"


def find_password_file(run_folder: Path, role: Role) -> Path:
    """Where the password of a role is, for the server that `forage demo` and `forage up` start with a run."""
    return run_folder / "redis" / "passwords" / name_user(role)


def list_rules(role: Role, run: str | None = None) -> list[str]:
    """The rules of a role's user, without passwords, after a `reset`.

    Args:
        run: the run whose keys it may use; None: those of all runs.
    """
    if role is Role.ADMIN:
        return ["~*", "&*", "+@all"]
    rights = RIGHTS[role]
    # The braces are part of the keys: in a cluster they put all keys of a run on one node.
    prefix = f"forage:{{{run or '*'}}}:"
    reads = [f"%R~{prefix}{key}" for key in rights.reads]
    writes = [f"~{prefix}{key}" for key in rights.writes]
    common = [*reads, *writes, "-@all", *(f"+{command}" for command in rights.common_commands)]
    grants = []
    for grant in rights.grants:
        words = [*(f"~{prefix}{key}" for key in grant.keys), "-@all", *(f"+{command}" for command in grant.commands)]
        grants.append(f"({' '.join(words)})")
    return [*common, *grants]


def describe_user(role: Role, passwords: Sequence[str], run: str | None = None, prefix: str = "forage") -> str:
    """A user as a line of an ACL file; all of its passwords are valid.

    Args:
        passwords: hashes of `hash_password`.
    """
    hashes = [f"#{password}" for password in passwords]
    return " ".join(["user", name_user(role, prefix), "on", *hashes, *list_rules(role, run)])


def describe_all(passwords: Mapping[Role, Sequence[str]], run: str | None = None, prefix: str = "forage") -> str:
    """An ACL file of a server that is for Forage alone: the given users, and none without a password."""
    lines = [describe_user(role, hashes, run, prefix) for role, hashes in passwords.items()]
    return "\n".join([DEFAULT_OFF, *lines]) + "\n"
