"""gRPC channels that speak TLS and send a token, both as the files are now, so that a process outlives a rotation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc

from forage_runtime.addresses import NO_PROXY
from forage_runtime.security.tls import Certificates
from forage_runtime.security.token_file import HEADER, TokenFile
from forage_runtime.settings import TlsSettings

LOOK_INTERVAL_S = 1.0
"""Least time between two looks at the files of certificates."""
RETIRE_S = 3600.0
"""Time for the calls of a channel whose certificates were replaced: more than any call lasts."""

Options = Sequence[tuple[str, Any]]
_OPTIONS = (
    *NO_PROXY,
    # By default a channel waits up to two minutes before it connects again, and fails calls meanwhile.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Calls go to all addresses of a name in turn, not only to the first.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
)


def open_channel(
    address: str, tls: TlsSettings, options: Options = (), tokens: TokenFile | None = None
) -> grpc.aio.Channel:
    """Open a channel to a service, without a proxy.

    Args:
        tokens: the first of them is sent with each call; None: none.

    Raises:
        SettingsError: a file is wrong.
    """
    options = [*_OPTIONS, *options]
    if not tls.is_on and tokens is None:
        return grpc.aio.insecure_channel(address, options=options)
    return _Channel(address, tls, options, tokens)


class _Channel(grpc.aio.Channel):  # type: ignore[misc]
    """Connects anew once certificates have changed (credentials of gRPC's own channels never do), and adds the token.

    The calls that are in progress end on the connection on which they began.
    """

    def __init__(self, address: str, tls: TlsSettings, options: Options, tokens: TokenFile | None) -> None:
        self._address = address
        self._options = list(options)
        self._tokens = tokens
        self._files = Certificates(tls) if tls.is_on else None
        self._current = self._connect()
        self._look_at = time.monotonic() + LOOK_INTERVAL_S
        self._retiring: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """The channel with the certificates of now."""
        if self._files is not None and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_INTERVAL_S
            if self._files.refresh():
                before, self._current = self._current, self._connect()
                task = asyncio.get_running_loop().create_task(before.close(RETIRE_S))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
        return self._current

    def authorize(self, metadata: Any) -> Any:
        """Metadata of a call, with the token of now."""
        if self._tokens is None:
            return metadata
        return (*(metadata or ()), (HEADER, f"Bearer {self._tokens.token}"))

    def unary_unary(self, *signature: Any, **options: Any) -> Any:
        return _Method(self, "unary_unary", signature, options)

    def unary_stream(self, *signature: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", signature, options)

    def stream_unary(self, *signature: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", signature, options)

    def stream_stream(self, *signature: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", signature, options)

    def get_state(self, try_to_connect: bool = False) -> Any:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for task in self._retiring:
            task.cancel()
        await self._current.close(grace)

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _connect(self) -> grpc.aio.Channel:
        if self._files is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        credentials = grpc.ssl_channel_credentials(self._files.ca, self._files.key, self._files.cert)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)


class _Method:
    """A method of a service, called on the channel that is current."""

    def __init__(self, channel: _Channel, kind: str, signature: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._signature = signature
        self._options = options
        self._bound: tuple[Any, Any] = (None, None)

    def __call__(self, *request: Any, metadata: Any = None, **options: Any) -> Any:
        current = self._channel.current()
        if self._bound[0] is not current:
            self._bound = (current, getattr(current, self._kind)(*self._signature, **self._options))
        return self._bound[1](*request, metadata=self._channel.authorize(metadata), **options)
