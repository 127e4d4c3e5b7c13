"""Serving a policy without a trainer: publish a model folder, wait for services or start them, build a prompt."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.status import Status
from rich.text import Text

from forage_cli.local.gpus import build_stack
from forage_cli.local.hardening import harden
from forage_cli.local.processes import interrupt_on_signals
from forage_cli.local.stack import SERVING, Program, Stack, end_earlier_stack, list_waiting
from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_queue.streams.client import StreamClient
from forage_runtime.addresses import split_address
from forage_runtime.clients.health import list_health_urls
from forage_runtime.errors import UnavailableError, UserError
from forage_runtime.files.model_folder import check_model_folder, list_weight_files
from forage_runtime.security.audit import record_act
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import Settings

_READY_S = 300.0


def publish(settings: Settings, folder: Path) -> Policy:
    """Publish a model folder as the policy to serve, under a new epoch.

    Raises:
        SettingsError: it must be signed, and there is no key for that.
        DataError: it is no model folder.
    """
    from forage_weights.announcement import sign_announcement

    check_model_folder(folder)
    signatures = RunSignatures(settings.security, settings.run.id)
    signatures.require_signer("this command")
    client = StreamClient(settings.redis, settings.run.id)
    client.create_groups()
    policy = Policy(
        version=0,
        uri=str(folder.absolute()),
        epoch=client.acquire_epoch(),
        published_unix_ms=int(time.time() * 1000),
        files=[_describe_file(folder / name) for name in list_weight_files(folder)],
    )
    sign_announcement(policy, signatures)
    client.publish(policy)
    act = {"run": settings.run.id, "version": 0, "epoch": policy.epoch, "uri": policy.uri}
    record_act("publish_policy", f"user {getpass.getuser()}", settings.security.audit_file, **act)
    return policy


def _describe_file(file: Path) -> PolicyFile:
    from forage_weights.digests import compute_digest

    return PolicyFile(name=file.name, digest=compute_digest(file), bytes=file.stat().st_size)


def prepare_stack(settings: Settings, programs: Sequence[Program], console: Console, with_console: bool) -> Stack:
    """Make what a run starts, after every check: world facts, what a killed command left, files, keys, the console.

    Raises:
        UserError: a check before the start failed.
    """
    from forage_cli.local import preflight
    from forage_cli.local.console import add_console

    prepare_world(settings, console)
    end_earlier_stack(settings)
    preflight.check_all(settings, programs)
    settings = harden(settings)
    return build_stack(settings, add_console(settings, programs, console) if with_console else programs, console)


def prepare_world(settings: Settings, console: Console) -> None:
    """Make the world facts, if the settings use data/world and a file of it is missing."""
    folder = Path("data", "world").absolute()
    wanted = [settings.data.corpus, *settings.data.train_paths, *settings.data.val_files]
    if any(file.absolute().parent == folder and not file.exists() for file in wanted):
        from forage_cli.datasets.world.write import build_world

        with console.status("making the world facts …"):
            build_world(folder, 0)


def start_stack(stack: Stack, console: Console, policy: Path | None) -> None:
    """Start the programs, and wait until all are ready.

    Args:
        policy: published once Redis is there, unless a remote engine serves; None: nothing is.

    Raises:
        UnavailableError: not ready within five minutes.
    """
    stack.start()
    if policy is not None and not stack.settings.rollout.engine.endpoint:
        stack.wait_for_redis()
        publish(stack.settings, policy)
    with console.status("starting …") as spinner:
        wait_until_ready(stack, spinner)


def wait_until_ready(stack: Stack, spinner: Status) -> None:
    """Supervise until every service is ready; the spinner shows what they wait for.

    Raises:
        UnavailableError: not ready within five minutes.
    """
    _wait(stack.list_waiting, spinner, stack.supervisor.tick, stack.folder / "logs")


def is_running(settings: Settings, program: Program) -> bool:
    """Whether the service listens at the settings' address, ready or not."""
    try:
        socket.create_connection(split_address(urlsplit(list_health_urls(settings)[program]).netloc)).close()
    except OSError:
        return False
    return True


def move_reward(settings: Settings) -> Settings:
    """Give a reward service free ports of this machine, beside one that may run."""
    names = ("grpc_address", "health_address")
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in taken]
    reward = settings.reward.model_copy(update=dict(zip(names, addresses, strict=True)))
    return settings.model_copy(update={"reward": reward})


def _wait(
    probe: Callable[[], Mapping[Program, str]],
    spinner: Status,
    tick: Callable[[], None] = lambda: None,
    logs: Path | None = None,
) -> None:
    """Wait until nothing is waited for.

    Args:
        probe: as of `list_waiting`.
        logs: folder with the logs of the services, if they are this command's.
    """
    begun = time.monotonic()
    while waiting := probe():
        passed_s = time.monotonic() - begun
        if passed_s > _READY_S:
            lines = [f"{name} is not ready after {_READY_S:.0f} s: {detail}" for name, detail in waiting.items()]
            lines += [] if logs is None else [f"see {logs / f'{name}.log'}" for name in waiting]
            raise UnavailableError("\n".join(lines))
        text = "; ".join(f"{name}: {detail}" for name, detail in waiting.items())
        spinner.update(Text(f"waiting for {text} ({passed_s:.0f} s)"))
        tick()
        time.sleep(0.5)  # wait: has a time limit, shown to the user


@contextmanager
def ensure_services(
    settings: Settings,
    console: Console,
    programs: Sequence[Program] = SERVING,
    model: Path | None = None,
    default: Path | None = None,
    activity: str = "serving",
) -> Iterator[Settings]:
    """Use running services, else start them and stop them when the block ends; yields their settings.

    Args:
        programs: services that the block needs; they count as running if the last one does.
        model: policy that was asked for, for which services must be started.
        default: policy to serve if services are started without such a policy; None = model.path.
        activity: as `Stack.activity`.

    Raises:
        UserError: a check before the start failed, the policy of a run is not signed as it must be, or services run and
            a policy was asked for.
        UnavailableError: not ready within five minutes.
    """
    last = programs[-1]
    if is_running(settings, last):
        if model is not None:
            raise UserError(
                f"services are already running at {settings.rollout.grpc_address}, and are not switched to {model}: "
                "leave it out, start other services with --base-port, or end these"
            )
        with console.status(f"waiting for the {last} service …") as spinner:
            _wait(lambda: list_waiting(settings, [last]), spinner)
        yield settings
        return
    from forage_weights.folders import open_whole
    from forage_weights.signed_folder import verify_published

    published = model or default or settings.model.path
    policy = open_whole(published)
    verify_published(published, policy, settings.security)
    served = f" with the policy {policy} (about a minute)" if Program.ROLLOUT in programs else ""
    console.print(f"no services are running: starting them{served}", highlight=False)
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": policy})})
    is_whole = Program.ROLLOUT in programs
    stack = (
        prepare_stack(settings, programs, console, with_console=False)
        if is_whole
        else build_stack(harden(settings), programs, console)
    )
    stack.activity = activity
    with interrupt_on_signals():
        try:
            start_stack(stack, console, policy if is_whole else None)
            yield stack.settings
        finally:
            stack.stop()
