"""What this machine can take from user code: its files, its network, its signals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from forage_runtime.errors import SettingsError
from forage_runtime.settings.security import Sandbox, UserCode
from forage_runtime.telemetry.logs import get_logger
from forage_sandbox import landlock, seccomp
from forage_sandbox.confinement import Confinement

SETTING = "security.user_code"


@dataclass(frozen=True)
class Support:
    """The mechanisms that processes of user code get.

    Attributes:
        landlock: its version; 0: none, and files are open.
        seccomp: whether system calls are filtered; if not, the network is open.
        missing: what is open → why.
    """

    landlock: int = 0
    seccomp: bool = False
    missing: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Which protections are on, and which are missing, as a sentence."""
        on = ["no secrets of the environment", "limits of memory, CPU and open files"]
        on += ["no files but its own and Python's"] if self.landlock else []
        on += ["no network", "no other programs"] if self.seccomp else []
        missing = "; ".join(f"{what} open ({why})" for what, why in self.missing.items())
        return ", ".join(on) + (f"; {missing}" if missing else "")


@cache
def find_support() -> Support:
    """What this machine has."""
    version, no_landlock = landlock.find_version()
    no_seccomp = seccomp.explain_missing()
    missing = {}
    if no_landlock:
        missing["files"] = no_landlock
    if no_seccomp:
        missing["network"] = missing["programs"] = no_seccomp
    return Support(version, not no_seccomp, missing)


def choose(mode: Sandbox) -> Support | None:
    """The protections of user code by the setting; None where it is off.

    Raises:
        SettingsError: it is `require`, and files or network would be open.
    """
    if mode == "off":
        return None
    found = find_support()
    if mode == "require" and found.missing:
        holes = "; ".join(f"{what} would be open: {why}" for what, why in found.missing.items())
        raise SettingsError(
            f"{SETTING} is require, and this machine cannot isolate user code ({holes}): run on such a kernel, or set"
            f" {SETTING}=auto to run with what there is"
        )
    return found


def build_confinement(setting: str, code: UserCode, memory_mib: int, mode: Sandbox) -> Confinement:
    """The confinement of a piece of user code by its section of the settings.

    Raises:
        SettingsError: as `choose`.
    """
    support = choose(mode)
    return Confinement(
        setting,
        tuple(os.path.realpath(path) for path in code.read),
        tuple(os.path.realpath(path) for path in code.write),
        network=code.network,
        programs=code.programs,
        memory_mib=memory_mib,
        landlock=support.landlock if support else 0,
        seccomp=support is not None and support.seccomp,
        is_on=support is not None,
    )


def describe(mode: Sandbox) -> str:
    """Which protections user code has by the setting, and which are missing and why; raises as `choose`."""
    support = choose(mode)
    return support.describe() if support else f"none: {SETTING} is off, so it may do whatever the service may"


def list_notes(codes: Mapping[str, UserCode], mode: Sandbox) -> dict[str, str]:
    """Notes for the readiness of a service that runs user code without every protection; raises as `choose`."""
    support = choose(mode)
    if not codes or (support and not support.missing):
        return {}
    return {"user code": f"{', '.join(codes)}: {describe(mode)}"}


def log_protections(kind: str, opened: Mapping[str, UserCode], mode: Sandbox) -> None:
    """Say in one line of the log how user code runs; raises as `choose`.

    Args:
        opened: name → the section with what its settings open.
    """
    support = choose(mode)
    log = get_logger().warning if support is None or support.missing else get_logger().info
    fields = UserCode.model_fields
    opens = {name: [field for field in fields if getattr(code, field)] for name, code in opened.items()}
    log("user_code", kind=kind, protections=describe(mode), opened=opens)
