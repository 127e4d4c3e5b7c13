"""An agent's engines: a connection to each replica, the choice among them, and generations that outlive a replica.

The agent holds the tokens of a trajectory, so what a replica that dies takes with it is the generation that it was
sampling. That one is asked again of another replica, whole: same context, same seed, and the versions of whichever
policy is served there. Nothing of the lost one is kept, so no token is in a trajectory twice.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.links.affinity import order_replicas
from forage_rollout.links.connection import LinkLostError
from forage_rollout.links.link import EngineAddress, EngineLink
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.background import supervise
from forage_runtime.errors import UnavailableError
from forage_runtime.telemetry import tracing
from forage_runtime.telemetry.log_sampling import LogSampler
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_runtime.text.chat_template import Chat
from forage_weights.rollout.policy import EngineLostError, NotServingError

log = get_logger()
T = TypeVar("T")
MAX_LOSSES = 8
"""Replicas that may die under one generation: it may be what they die of."""
AVOID_S = 1.0
"""How long a replica that refused a request gets no other one while another replica serves."""
_RETRY_S, _MAX_RETRY_S = 0.05, 2.0
_LOOK_S = 5.0
_FIRST_S = 2.0
_WHY_WAIT = "Serve replaces replicas, and a trajectory has a time limit"
_sampler = LogSampler(per_minute=6)


@dataclass
class PoolCounts:
    """Totals since an agent started, and the connections that it has.

    repeated_tokens: of the generations that replaced lost ones; at most so many were sampled twice.
    """

    engine_links: int = 0
    links_lost: int = 0
    generations_repeated: int = 0
    repeated_tokens: int = 0


class EnginePool:
    """`loop.generation.Engine` over the replicas of `set_replicas`. For one event loop.

    Args:
        releases: whether engines need to know that an affinity gets no more requests. One with a lease on a policy
            stays where it has it, whatever the load, for as long as that replica may be asked.
        tls: what connections speak; None: plain text.
    """

    def __init__(self, releases: bool, tls: ssl.SSLContext | None = None) -> None:
        self._releases = releases
        self._tls = tls
        self._replicas: dict[str, _Replica] = {}
        self._homes: dict[str, str] = {}  # affinity → the replica where it has a lease
        self._changed = asyncio.Event()
        self._counts = PoolCounts()

    @property
    def counts(self) -> PoolCounts:
        """Counts as of now."""
        self._counts.engine_links = sum(replica.is_open for replica in self._replicas.values())
        return self._counts

    def set_replicas(self, addresses: Mapping[str, EngineAddress]) -> None:
        """Connect to these replicas from now on, by name. Requests in progress at others may end there."""
        for name in [name for name, replica in self._replicas.items() if addresses.get(name) != replica.address]:
            self._replicas.pop(name).retire()
        for name, address in addresses.items():
            if name not in self._replicas:
                self._replicas[name] = _Replica(name, address, self._tls, self._notify, self._counts)

    async def wait_for_links(self) -> None:
        """Return once a connection to each replica was tried, or after two seconds: then the first have the choice."""
        tried = asyncio.gather(*(replica.tried.wait() for replica in self._replicas.values()))  # wait: has a time limit
        with suppress(TimeoutError):
            await asyncio.wait_for(tried, _FIRST_S)  # wait: has a time limit

    async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
        """See `loop.generation.Engine`."""
        return await self._ask("", lambda link: link.render_chat(messages, values), self._note_nothing)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate on the replica of the request's affinity, or elsewhere; the caller has a deadline.

        Waits where no replica can be reached or serves: another takes over, or it is back soon.

        Raises:
            UnavailableError: `MAX_LOSSES` replicas died under it.
        """
        losses = 0

        def note_loss(error: Exception) -> None:
            nonlocal losses
            losses += 1
            self._counts.generations_repeated += 1
            tracing.current_span().add_event("generation_lost", {"forage.error": str(error)})
            if losses == MAX_LOSSES:
                raise UnavailableError(f"{losses} engines were lost under one generation, the last one: {error}")

        generation = await self._ask(request.affinity, lambda link: link.generate(request), note_loss)
        if losses:
            self._counts.repeated_tokens += len(generation.token_ids)
        return generation

    async def release(self, affinity: str) -> None:
        """Tell every replica: under load its generations went to several, and each may hold a lease.

        A replica that cannot be reached, or does not hear it, ends the lease with its time limit.
        """
        self._homes.pop(affinity, None)
        if self._releases:
            for replica in self._replicas.values():
                if replica.link is not None:
                    replica.link.release(affinity)

    async def close(self) -> None:
        """End every connection; requests in progress fail."""
        replicas = list(self._replicas.values())
        self._replicas.clear()
        for replica in replicas:
            replica.close()
        await asyncio.sleep(0)

    async def _ask(
        self, affinity: str, ask: Callable[[EngineLink], Awaitable[T]], note_loss: Callable[[Exception], None]
    ) -> T:
        while True:
            replica, link = await self._choose(affinity)
            try:
                return await ask(link)
            except (LinkLostError, EngineLostError) as error:
                if isinstance(error, EngineLostError):  # its process still takes requests
                    replica.avoid()
                if _sampler.admit(replica.name):  # every generation that it had says so
                    log.warning("engine_lost", replica=replica.name, detail=str(error))
                note_loss(error)
            except NotServingError:
                replica.avoid()

    @staticmethod
    def _note_nothing(error: Exception) -> None:
        """A chat that is rendered again costs nothing."""

    async def _choose(self, affinity: str) -> tuple[_Replica, EngineLink]:
        while True:
            now = time.monotonic()
            loads: dict[str, int] = {}
            standing: dict[str, int] = {}  # loads of those that stand still: asked where there is no other one
            avoided_until = now + _LOOK_S
            for name, replica in self._replicas.items():
                if (load := replica.load) is None:
                    continue
                if replica.avoided_until > now:
                    avoided_until = min(avoided_until, replica.avoided_until)
                elif replica.stands_still:
                    standing[name] = load
                else:
                    loads[name] = load
            if loads := loads or standing:
                if (home := self._homes.get(affinity)) not in loads:
                    home = order_replicas(affinity, loads)[0]
                if self._releases and affinity:
                    self._homes[affinity] = home
                replica = self._replicas[home]
                assert replica.link is not None
                return replica, replica.link
            self._changed.clear()
            with (
                suppress(TimeoutError),
                waiting("an engine to ask", on="engine", limit_s=None, why_unlimited=_WHY_WAIT),
            ):
                async with asyncio.timeout(avoided_until - now):
                    await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()


class _Replica:
    """One replica, and the connection to it: made anew whenever it ends, until the replica is retired.

    Attributes:
        link: the open connection; None while there is none.
        avoided_until: by the monotonic clock, see `AVOID_S`.
        tried: set when the first attempt to connect has ended.
    """

    def __init__(
        self,
        name: str,
        address: EngineAddress,
        tls: ssl.SSLContext | None,
        notify: Callable[[], None],
        counts: PoolCounts,
    ) -> None:
        self.name = name
        self.address = address
        self.link: EngineLink | None = None
        self.avoided_until = 0.0
        self.tried = asyncio.Event()
        self._tls = tls
        self._notify = notify
        self._counts = counts
        self._keeping = supervise(self._keep_connected(), f"engine link {name}")

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent to it."""
        return self.link is not None and self.link.is_open

    @property
    def stands_still(self) -> bool:
        """Whether its engine has work and does none."""
        return self.link is not None and self.link.stands_still

    @property
    def load(self) -> int | None:
        """Requests in progress there; None where none may be sent."""
        link = self.link
        return link.others + link.in_progress if link is not None and link.is_open else None

    def avoid(self) -> None:
        """Send it no more requests for a moment, if another replica serves."""
        self.avoided_until = time.monotonic() + AVOID_S

    def retire(self) -> None:
        """Connect no more; the connection ends with the last request on it."""
        if self.link is not None:
            self.link.end_when_idle()  # and is watched until then
        else:
            self._keeping.cancel()

    def close(self) -> None:
        """End the connection now."""
        self._keeping.cancel()
        if self.link is not None:
            self.link.abort()

    async def _keep_connected(self) -> None:
        pause_s = _RETRY_S
        while True:
            try:
                self.link = link = await EngineLink.connect(self.address, self._tls)
            except (OSError, TimeoutError, LinkLostError) as error:
                self.tried.set()
                if _sampler.admit(f"{self.name} unreachable"):
                    log.warning("engine_unreachable", replica=self.name, detail=f"{type(error).__name__}: {error}")
                await asyncio.sleep(pause_s)  # wait: pause before the next attempt, until the replica is retired
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
                continue
            self.tried.set()
            self._notify()
            made_at = time.monotonic()
            await link.watch()
            self.link = None
            if link.is_leaving:
                return
            self._counts.links_lost += 1
            if time.monotonic() - made_at > _MAX_RETRY_S:
                pause_s = _RETRY_S
            else:  # it ends as soon as it is used
                await asyncio.sleep(pause_s)  # wait: pause before the next attempt
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
