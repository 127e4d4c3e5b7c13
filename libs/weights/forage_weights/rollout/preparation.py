"""An announced policy is prepared while the engine generates: held, verified, and made ready in the workers.

Its files are held on this machine for as long as the engine reads them. Its tensors must have the names, shapes and
data types of the served model, and finite values, before they come near it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.devices import count_cpus
from forage_runtime.settings import Settings
from forage_runtime.telemetry.waits import waiting
from forage_weights.announcement import Admission, PolicyError, describe_policy
from forage_weights.cache import CachedDelta, CachedPolicy, PolicyCache
from forage_weights.tensors import TensorInfo, find_non_finite, read_headers, read_tensor

TIED_HEAD = "lm_head.weight"
FLOATS = ("BF16", "F16", "F32", "F64")
"""Data types that convert to each other; a tensor of any other type must have that of the model."""
_READERS = 16
# By the engine's type: the bits of the smallest number of a tensor's type that is infinite there.
_TOO_LARGE = {
    "float16": {"BF16": 0x4780, "F32": 0x477FF000, "F64": 0x40EFFE0000000000},
    "bfloat16": {"F32": 0x7F7F8000, "F64": 0x47EFF00000000000},
    "float32": {"F64": 0x47EFFFFFF0000000},
}
T = TypeVar("T")
_LOOK_S = 0.2
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05


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
async def hold_policy(cache: PolicyCache, policy: Policy) -> AsyncIterator[CachedPolicy]:
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


def verify_tensors(policy: Policy, files: Iterable[Path], expected: Mapping[str, TensorInfo], dtype: str) -> None:
    """Return if the tensors are those of the served model, and finite in the type that the engine computes in.

    The output head may be missing or added: where it is tied to the embedding, some files hold it and some do not.

    Args:
        expected: headers of the model that the engine was started with.
        dtype: name of the engine's type in torch.

    Raises:
        PolicyError: the sentence names the tensor, what was found and what was expected.
    """
    try:
        found = read_headers(files)
    except ValueError as error:
        raise PolicyError(f"{describe_policy(policy)}: {error}") from None
    problems = [
        problem
        for name in sorted((found.keys() | expected.keys()) - {TIED_HEAD})
        if (problem := _compare(name, found.get(name), expected.get(name)))
    ]
    if problems:
        raise PolicyError(
            f"{describe_policy(policy)} does not fit the model that is served: {problems[0]}; "
            f"{len(problems) - 1} more differ"
        )
    verify_finite(policy, found, dtype)


def verify_finite(policy: Policy, found: Mapping[str, TensorInfo], dtype: str) -> None:
    """Return if all numbers are finite in the type that the engine computes in.

    Raises:
        PolicyError: the sentence names the tensor and the element.
    """
    threads = min(_READERS, count_cpus())
    with ThreadPoolExecutor(threads, thread_name_prefix="finite") as pool:
        for problem in pool.map(lambda name: _find_infinite(name, found[name], dtype), found):
            if problem:
                pool.shutdown(cancel_futures=True)
                raise PolicyError(f"{describe_policy(policy)}: {problem}")


def _compare(name: str, found: TensorInfo | None, expected: TensorInfo | None) -> str:
    """What is wrong with a tensor; empty if nothing is."""
    if found is None or expected is None:
        return f"{name} is missing" if found is None else f"{name} is not expected"
    if found.shape != expected.shape:
        return f"{name} has shape {list(found.shape)}, expected {list(expected.shape)}"
    if found.dtype != expected.dtype and not {found.dtype, expected.dtype} <= {*FLOATS}:
        accepted = " or ".join(FLOATS if expected.dtype in FLOATS else (expected.dtype,))
        return f"{name} has dtype {found.dtype}, expected {accepted}"
    return ""


def _find_infinite(name: str, info: TensorInfo, dtype: str) -> str:
    try:
        tensor = read_tensor(info)
    except (OSError, ValueError) as error:
        return str(error)
    position = find_non_finite(tensor)
    if position is not None:
        return f"{name} is not finite at element {position}, expected finite numbers"
    limit = _TOO_LARGE.get(dtype, {}).get(info.dtype)
    if limit is not None and info.elements:
        magnitudes = tensor.bits & ((1 << (8 * info.width - 1)) - 1)
        if magnitudes.max() >= limit:
            return f"{name} is infinite at element {magnitudes.argmax()} once it is {dtype}, expected smaller numbers"
    return ""


@dataclass(frozen=True)
class StagedPolicy:
    """A policy that every worker has ready.

    Attributes:
        number: its name in the workers.
        pause_s: seconds for which the worker that took longest stood still to begin with it.
    """

    number: int
    pause_s: float


class Stager:
    """Has every worker of one AsyncLLM make a policy ready.

    Args:
        llm: vLLM's AsyncLLM.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._numbers = itertools.count(1)
        self._dropping: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def stage(
        self, policy: Policy, files: Sequence[Path], deltas: Sequence[CachedDelta] = (), content: str = ""
    ) -> AsyncIterator[StagedPolicy]:
        """Make a policy ready; in the block it can be put in place by its number, and is dropped at its end if not.

        Args:
            files: safetensors files on this machine that hold the whole policy.
            deltas: those that lead to the policy, oldest first.
            content: digest of the whole policy; empty if unknown.

        Raises:
            PolicyError: it cannot be loaded; the workers go on as before.
        """
        number = next(self._numbers)
        stamps = read_stamps(policy, files)
        try:
            changes = [(delta.base, [str(file) for file in delta.files]) for delta in deltas]
            arguments = number, [str(file) for file in files], changes, content
            pause_s = await call_living(self._llm, self._make_ready(policy, arguments))
            if read_stamps(policy, files) != stamps:
                raise PolicyError(f"{describe_policy(policy)}: its files have changed while they were read")
            yield StagedPolicy(number, pause_s)
        finally:
            # Not waited for: the call takes until the step has ended in which the new policy computes all keys again.
            dropping = asyncio.create_task(self._drop(number))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, number: int) -> None:
        # An engine that has died has nothing to drop, and whoever waits for it hears of that elsewhere.
        with contextlib.suppress(Exception):
            await self._llm.collective_rpc("drop_policy", args=(number,))

    async def _make_ready(self, policy: Policy, arguments: tuple[Any, ...]) -> float:
        pause_s: float = max(await self._llm.collective_rpc("begin_policy", args=arguments))
        interval_s = _FIRST_POLL_S
        with waiting(
            "a policy to be loaded beside the served one",
            on="the engine's workers",
            limit_s=None,
            why_unlimited="the old policy is served meanwhile, and a newer announcement ends it",
            detail=describe_policy(policy),
        ):
            while True:
                states = await self._llm.collective_rpc("poll_policy", args=arguments[:1])
                if errors := [error for _, error in states if error]:
                    raise PolicyError(f"{describe_policy(policy)} cannot be loaded ({errors[0]})")
                if all(is_ready for is_ready, _ in states):
                    return pause_s
                await asyncio.sleep(interval_s)
                interval_s = min(2 * interval_s, _LAST_POLL_S)


async def call_living(llm: Any, call: Coroutine[Any, Any, T]) -> T:
    """Wait for calls of an engine's process, which vLLM leaves without an answer when the process dies.

    Raises:
        EngineDeadError: it has died.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    calling = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([calling], timeout=_LOOK_S))[0]:  # wait: named by the caller
            if llm.errored:
                raise EngineDeadError
        return calling.result()
    finally:
        calling.cancel()


def read_stamps(policy: Policy, files: Sequence[Path]) -> list[tuple[int, ...]]:
    """What tells whether files have changed.

    Raises:
        PolicyError: a file cannot be read.
    """
    try:
        found = [file.stat() for file in files]
    except OSError as error:
        raise PolicyError(f"{describe_policy(policy)}: {error.filename} cannot be read ({error.strerror})") from None
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]
