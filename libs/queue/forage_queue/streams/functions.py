"""The Lua scripts of the streams, as one library of functions in the server.

A function is data of the server: its append-only file has it, its replicas get it, and a client that may only call it
needs neither EVAL nor SCRIPT LOAD, by which it could run Lua of its own. Scripts that are called by their digest
(EVALSHA) live in a cache that each restart and each failover empties, and then only a client with SCRIPT LOAD can fill
it again. The library's name has the digest of its code: after an upgrade that changes a script, the library of an older
trainer stays beside the new one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

_BEGIN = re.compile(r"^--@script (\w+)\n", re.MULTILINE)
_FLAGS = re.compile(r"#!lua flags=([a-z,-]+)\n")
_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'(?:, '(CREATE|DELCONSUMER|CONSUMERS)')?")
LIBRARY_PREFIX = "forage_"
FACTS = "forage_server"
"""Library in which the administrator's `forage redis load` leaves what CONFIG GET says, for those who may not ask."""


@dataclass(frozen=True)
class Library:
    """Code for FUNCTION LOAD, and its name in the server."""

    name: str
    code: str


@cache
def _read_scripts() -> dict[str, str]:
    """The Lua code of each script, by its name."""
    text = (resources.files("forage_queue.streams") / "scripts.lua").read_text(encoding="utf-8")
    _, *parts = _BEGIN.split(text)
    return {name: code.rstrip("\n") + "\n" for name, code in zip(parts[::2], parts[1::2], strict=True)}


def read_script(name: str) -> str:
    """Read a Lua script; those of the trainer include the check of its epoch."""
    scripts = _read_scripts()
    return scripts[name].replace("--@fence\n", scripts["fence"])


@cache
def list_scripts() -> tuple[str, ...]:
    """The names of all scripts, each of which is a function of the library."""
    return tuple(sorted(name for name in _read_scripts() if name != "fence"))


@cache
def is_read_only(script: str) -> bool:
    """Whether a script changes nothing: its function is called by FCALL_RO, which needs no right to write its keys."""
    return "no-writes" in _read_flags(read_script(script))


@cache
def list_commands(script: str) -> frozenset[str]:
    """The commands that a script calls, as access lists name them. Its caller needs the right to each."""
    return frozenset("|".join(filter(None, words)).lower() for words in _CALL.findall(read_script(script)))


@cache
def build_library() -> Library:
    """The library of all scripts."""
    scripts = {name: read_script(name) for name in list_scripts()}
    name = LIBRARY_PREFIX + hashlib.sha256("\0".join(scripts.values()).encode()).hexdigest()[:12]
    functions = [_register(f"{name}_{script}", text) for script, text in scripts.items()]
    return Library(name, "\n".join([f"#!lua name={name}", *functions]))


@cache
def name_function(script: str) -> str:
    """The name of a script's function in the server."""
    return f"{build_library().name}_{script}"


def build_facts(options: dict[str, str]) -> Library:
    """A library with a function for each option of the server, which returns its value."""
    functions = [
        _register(f"{FACTS}_{option}", f"#!lua flags=no-writes\nreturn '{value}'\n")
        for option, value in options.items()
    ]
    return Library(FACTS, "\n".join([f"#!lua name={FACTS}", *functions]))


def _register(name: str, script: str) -> str:
    flags = ", ".join(f"'{flag}'" for flag in _read_flags(script))
    callback = f"function(KEYS, ARGV)\n{_FLAGS.sub('', script, count=1)}end"
    return f"redis.register_function{{function_name = '{name}', flags = {{{flags}}}, callback = {callback}}}\n"


def _read_flags(script: str) -> list[str]:
    flags = _FLAGS.match(script)
    assert flags is not None, "a script begins with its flags"
    return flags.group(1).split(",")
