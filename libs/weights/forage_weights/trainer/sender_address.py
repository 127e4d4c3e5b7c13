"""The trainer's sender of the direct transport: where engines reach it, and what of it is counted."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from prometheus_client import Counter, Gauge

from forage_runtime.addresses import EVERY_HOST, join_address, split_address
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import Settings
from forage_weights.direct_sender import DirectSender

SENT = Counter("forage_trainer_direct_bytes_total", "Bytes of policies that the trainer sent to engines itself")
TRANSFERS = Counter(
    "forage_trainer_direct_transfers_total",
    "Transfers that engines asked the trainer for",
    labelnames=["outcome", "backend"],
)
RUNNING = Gauge("forage_trainer_direct_running", "Transfers to engines in progress")
_ANY_PORT = 9


def open_sender(settings: Settings) -> DirectSender | None:
    """Open the sender of a run whose engines ask for one.

    Raises:
        UserError: there is no address where they reach it.
    """
    if settings.rollout.weights.transport != "direct":
        return None
    publish = settings.trainer.publish
    host, port = split_address(publish.direct_address or ":0")
    if host in EVERY_HOST:
        raise SettingsError(
            f"trainer.publish.direct_address={publish.direct_address}: name the address that engines connect to"
        )
    host = host or _find_own_address(settings.redis.url)
    sender = DirectSender(join_address(host, port), uses_gpu=publish.direct_backend == "auto", count=_count)
    RUNNING.set_function(sender.count_running)
    return sender


def _count(outcome: str, backend: str, size: int) -> None:
    TRANSFERS.labels(outcome, backend).inc()
    if outcome == "sent":
        SENT.inc(size)


def _find_own_address(redis_url: str) -> str:
    """The address of this machine from which it reaches Redis, as engines do."""
    host = urlsplit(redis_url).hostname or "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"the address of this machine towards {host} is unknown ({error.strerror}): "
            "set trainer.publish.direct_address"
        ) from None
