"""Files of announced policies on this machine, for as long as an engine reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.settings import Settings
from forage_weights.admission import Admission
from forage_weights.cache import Held, PolicyCache


def open_cache(settings: Settings) -> PolicyCache:
    """Open the cache of this machine; with `transport=direct` it receives what a trainer sends, and sends it on.

    Where signatures are required, what is loaded is a copy in it: a folder that was verified may be written to again.

    Raises:
        SettingsError: a key file of the section `security` is wrong.
    """
    weights, check = settings.rollout.weights, Admission(settings).check
    folder, copies_all = weights.cache_dir.resolve(), settings.security.require_signed
    if weights.transport != "direct":
        return PolicyCache(folder, check=check, copies_all=copies_all)
    from forage_weights.rollout.direct_receiver import DirectReceiver  # imports torch

    receiver = DirectReceiver()
    return PolicyCache(folder, receive=receiver.receive, offer=receiver.offer, check=check, copies_all=copies_all)


@asynccontextmanager
async def hold_policy(cache: PolicyCache, policy: Policy) -> AsyncIterator[Held]:
    """Hold the verified files of a policy, which are fetched first if need be; generation goes on meanwhile.

    Raises:
        PolicyError: the policy must not be served.
    """
    holding = cache.hold(policy)
    # Where this is cancelled the thread goes on; the files are let go of when it ends, as nobody refers to them then.
    held = await asyncio.to_thread(holding.__enter__)
    try:
        yield held
    finally:
        holding.__exit__(None, None, None)
