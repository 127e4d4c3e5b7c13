"""Errors of an engine as they cross a connection: known kinds keep their type, all others are an `EngineError`."""

from __future__ import annotations

from forage_rollout.links.frames import FrameError
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.errors import ForageError, UnavailableError
from forage_weights.rollout.policy import EngineLostError, NotServingError


class EngineError(ForageError):
    """An engine failed in a way that nobody foresaw; its log says how."""


class LinkLostError(ForageError):
    """The connection to an engine ended before its reply."""


_KINDS: tuple[type[Exception], ...] = (
    EngineError,
    EngineLostError,  # before its base
    NotServingError,
    UnavailableError,
    RefusedError,
    MalformedReplyError,
    ValueError,
)


def is_foreseen(error: Exception) -> bool:
    """Whether an error keeps its type."""
    return isinstance(error, _KINDS)


def pack_failure(error: Exception) -> bytes:
    """The body of FAILED, but for the load before it."""
    kind = next((i for i, one in enumerate(_KINDS) if isinstance(error, one)), 0)
    text = str(error) if is_foreseen(error) else f"{type(error).__name__}: {error}"
    return bytes([kind]) + text.encode(errors="replace")


def unpack_failure(body: bytes) -> Exception:
    """What `pack_failure` has packed.

    Raises:
        FrameError: the bytes are no failure.
    """
    if not body or body[0] >= len(_KINDS):
        raise FrameError("no failure that is known here")
    return _KINDS[body[0]](body[1:].decode(errors="replace"))
