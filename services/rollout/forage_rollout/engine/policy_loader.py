"""How one engine gets another policy: in place while it generates, or by another start of vLLM; never unchecked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forage_proto.v1.trajectory_pb2 import Policy
from forage_rollout.engine.engine_counts import EngineCounts, Meter
from forage_rollout.engine.generation_pause import GenerationPause
from forage_rollout.engine.instance import Instance, lay_out_model
from forage_rollout.engine.leases import Leases
from forage_rollout.vllm_start.start_errors import EngineStartError, explain_start
from forage_runtime.files.model_folder import list_weight_files
from forage_runtime.files.served_lora import get_served_lora_rank
from forage_runtime.security.audit import record_act
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_runtime.telemetry.waits import waiting
from forage_weights.announcement import PolicyError, check_canary, describe_policy
from forage_weights.rollout.adapter import verify_adapter
from forage_weights.rollout.canary import CanaryCheck, CanaryError
from forage_weights.rollout.policy import format_label, is_newer
from forage_weights.rollout.preparation import StagedPolicy, call_living, hold_policy, open_cache, verify_tensors
from forage_weights.tensors import SUFFIX, read_headers

log = get_logger()
T = TypeVar("T")
_LOOK_S = 0.05
_START = "vLLM starts or says why not"
_COSTS = "from now on vLLM is started with each policy, and out of service for as long"


class PolicyLoader:
    """What one engine serves, and its way to the next policy.

    Args:
        meter: counts the loads.
        leases: as of drain mode, where a load waits for them; else None.

    Attributes:
        instance: vLLM with the policy that is served; a fresh load replaces it.
        canary: what checks every policy that was loaded.
        serving, out_of_service, is_starting_again: as of `VllmEngine`.
        lock: held by a load, and by whatever must not happen during one.

    Raises:
        SettingsError: as `Instance` and `open_cache`.
    """

    def __init__(self, settings: Settings, meter: Meter, leases: Leases | None) -> None:
        self._settings, self._meter, self._leases = settings, meter, leases
        self._model = Path(settings.model.path).resolve()
        self._expected = read_headers(self._model / name for name in list_weight_files(self._model))
        self._shapes = {name: info.shape for name, info in self._expected.items()}
        self._max_lora_rank = get_served_lora_rank(settings)
        self._cache = open_cache(settings)
        self._loads_in_place = True
        self.canary = CanaryCheck(settings.rollout.weights.canary, settings.rollout.engine.hang_timeout_s)
        self.instance = Instance(settings, self._model)
        self.lock = asyncio.Lock()
        self.serving: Policy | None = None
        self.out_of_service = ""
        self.is_starting_again = False
        self._is_closed = False
        self._has_instance = asyncio.Event()
        self._has_instance.set()

    def close(self) -> None:
        """End a start of vLLM that is under way, which no cancellation reaches, once it has succeeded."""
        self._is_closed = True

    async def change_pause(self, change: Callable[[GenerationPause], Coroutine[Any, Any, None]]) -> None:
        """Pause or resume the engine; while vLLM starts with a policy, the one that starts.

        Raises:
            EngineDeadError: it has died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        while True:
            with waiting("vLLM to start with a policy", on="this engine", limit_s=None, why_unlimited=_START):
                await self._has_instance.wait()
            instance = self.instance
            try:
                return await call_living(instance.llm, change(instance.pause))
            except EngineDeadError:
                if self._has_instance.is_set() and instance is self.instance:
                    raise

    async def load(self, policy: Policy, allow_older: bool = False) -> float:
        """Serve another policy. A caller that is cancelled before the pause leaves the engine as it was.

        Running generations go on under the new policy; those with an adapter keep theirs to their end. In drain mode
        the load waits until all leases are released.

        Args:
            allow_older: the policy need not be newer than the served one: it is the one that the trainer announced.

        Returns:
            Seconds that generation stood still.

        Raises:
            PolicyError: the policy must not be served; the engine goes on as before.
        """
        async with self.lock:
            await self.instance.pause.has_weights.wait()  # wait: for the end of a sleep, which has a time limit
            try:
                self._check_policy(policy, allow_older)
                load = self._load_adapter if policy.adapter else self._load_whole
                seconds = await load(policy)
            except Exception:
                self._meter.counts.policy_failures += 1
                raise
        self._meter.counts.policy_updates += 1
        which = {"version": policy.version, "epoch": policy.epoch}
        log.info("policy_loaded", **which, seconds=round(seconds, 3), difference=self.canary.difference)
        return seconds

    def _check_policy(self, policy: Policy, allow_older: bool) -> None:
        check_canary(policy, self.instance.llm.model_config.get_vocab_size())
        if not allow_older and not is_newer(policy, self.serving):
            served = "" if self.serving is None else describe_policy(self.serving)
            raise PolicyError(f"{describe_policy(policy)} is not newer than {served}, now served")
        if policy.adapter != bool(self._max_lora_rank):
            kind = "a LoRA adapter" if policy.adapter else "a whole policy"
            raise PolicyError(
                f"{describe_policy(policy)} is {kind} and "
                f"rollout.engine.max_lora_rank is {self._max_lora_rank}: "
                "an engine with a rank loads adapters only, one without loads none"
            )

    async def _load_adapter(self, policy: Policy) -> float:
        async with hold_policy(self._cache, policy) as held:
            folder = await asyncio.to_thread(verify_adapter, policy, held.files, self._shapes, self._max_lora_rank)
            await self._check_initial(policy)
            async with self.drain():
                try:
                    await self._put_adapter(policy, folder, is_fresh=False)
                    seconds = 0.0
                except CanaryError as error:
                    seconds = await _complete(self._load_afresh(policy, held.files, error))
                self._set_serving(policy)
        self._meter.counts.adapter_loads += 1
        return seconds

    async def _put_adapter(self, policy: Policy, folder: Path, is_fresh: bool) -> None:
        instance = self.instance
        check = partial(self.canary.require, instance.llm, instance.bounds, policy, is_fresh)
        await instance.adapters.load_adapter(policy, folder, check)

    async def _check_initial(self, policy: Policy) -> None:
        """Measure by what trainer and engine differ where the engine was started with the very same weights."""
        if self.serving is None and policy.version == 0 and not self.instance.pause.is_asleep:
            await self.canary.require(self.instance.llm, self.instance.bounds, policy, is_fresh=True)

    async def _load_whole(self, policy: Policy) -> float:
        """Load a policy while the old one is served; only to put it in place is there a pause."""
        counts, began = self._meter.counts, time.perf_counter()
        async with contextlib.AsyncExitStack() as stack:
            held = await stack.enter_async_context(hold_policy(self._cache, policy))
            files = [file for file in held.files if file.suffix == SUFFIX]
            await asyncio.to_thread(verify_tensors, policy, files, self._expected, self.instance.dtype)
            await self._check_initial(policy)
            if self._loads_in_place:
                stager = self.instance.stager
                staged = await stack.enter_async_context(stager.stage(policy, files, held.deltas, held.content))
            counts.policy_stage_seconds += time.perf_counter() - began
            await stack.enter_async_context(self.drain())
            if self._loads_in_place:
                return await _complete(self._put_policy(policy, staged, files))
            await self._finish_generations(policy)
            return await _complete(self._load_afresh(policy, files))

    async def _put_policy(self, policy: Policy, staged: StagedPolicy, files: Sequence[Path]) -> float:
        instance = self.instance
        check = partial(self.canary.require, instance.llm, instance.bounds, policy, is_fresh=False)
        try:
            waited, paused = await call_living(instance.llm, instance.pause.put_policy(policy, staged.number, check))
        except CanaryError as error:
            return await self._load_afresh(policy, files, error)
        except BaseException as error:
            # Partially replaced weights belong to no policy. Ending the engine makes Serve start another one.
            self.out_of_service = (
                f"{describe_policy(policy)} was partially loaded ({error!r}): the engine must be started again"
            )
            instance.kill()
            raise
        self._meter.counts.policy_wait_seconds += waited
        self._meter.counts.policy_pause_seconds += staged.pause_s + paused
        self._set_serving(policy)
        return staged.pause_s + paused

    async def _load_afresh(self, policy: Policy, files: Sequence[Path], error: CanaryError | None = None) -> float:
        """Start vLLM with a policy, in place of the running one, whose generations are lost.

        Args:
            files: of the policy: its weights, or its adapter.
            error: why this follows a load in place.

        Returns:
            Seconds for which the engine was out of service.

        Raises:
            CanaryError: it is not served afresh either: the engine stays out of service.
            PolicyError: vLLM does not start with it.
        """
        began, before = time.perf_counter(), self.instance
        self._leave_service(policy)
        try:
            if error is not None:
                log.warning("policy_loaded_afresh", reason=str(error))
            self._has_instance.clear()
            await before.retire()
            own = [self._model / name for name in list_weight_files(self._model)]
            with lay_out_model(self._model, own if policy.adapter else files) as folder:
                instance = await asyncio.to_thread(self._start, folder)
            pause = before.pause
            before.shutdown()
            self.instance = instance
            await call_living(instance.llm, instance.pause.take_over(pause))
            self._has_instance.set()
            await call_living(instance.llm, self._check_fresh(instance, policy, files))
        except EngineStartError as failed:  # without an engine this replica is replaced
            log.error("engine_not_started", reason=failed.failure.reason, exception=failed.failure.details)
            self.out_of_service = f"{describe_policy(policy)} cannot be loaded afresh: {failed.failure.reason}"
            raise PolicyError(self.out_of_service) from failed
        except CanaryError as wrong:
            self.out_of_service = str(wrong)
            raise
        except BaseException as failed:
            self.out_of_service = f"{describe_policy(policy)} cannot be loaded afresh: {failed!r}"
            raise
        finally:
            self.is_starting_again = False
            self._has_instance.set()
        seconds = time.perf_counter() - began
        self._meter.counts.fresh_loads += 1
        which = {"version": policy.version, "epoch": policy.epoch, "uri": policy.uri}
        record_act(
            "load_policy_afresh", "an engine", self._settings.security.audit_file, **which, reason=str(error or "")
        )
        is_wrong = error is not None and error.difference > instance.bounds.find(policy.canary, is_fresh=False)
        if is_wrong and not policy.adapter:
            self._loads_in_place = False
            log.warning("policies_loaded_afresh", reason=str(error), seconds=round(seconds, 1), detail=_COSTS)
        self._set_serving(policy)
        return seconds

    def _start(self, folder: Path) -> Instance:
        with explain_start(self._model):
            instance = Instance(self._settings, folder)
        if self._is_closed:
            instance.shutdown()
            raise asyncio.CancelledError
        return instance

    async def _check_fresh(self, instance: Instance, policy: Policy, files: Sequence[Path]) -> None:
        if policy.adapter:
            await self._put_adapter(policy, files[0].parent, is_fresh=True)
        else:
            await self.canary.require(instance.llm, instance.bounds, policy, is_fresh=True)
        await instance.llm.update_weight_version(format_label(policy))

    async def replace_serving(self, error: CanaryError) -> None:
        """Load the policy afresh that was put in place while there was no cache, and could not be checked until now.

        Raises:
            PolicyError: it is not served afresh either: the engine stays out of service.
        """
        assert self.serving is not None
        policy = self.serving
        async with self.lock, hold_policy(self._cache, policy) as held:
            files = [file for file in held.files if file.suffix == SUFFIX]
            await _complete(self._load_afresh(policy, files, error))

    async def _finish_generations(self, policy: Policy) -> None:
        """Wait for the generations that run; others are refused meanwhile, and until the policy is loaded afresh."""
        limit_s, before = self._settings.rollout.trajectory_timeout_s, self.out_of_service
        self._leave_service(policy)
        try:
            with contextlib.suppress(TimeoutError), waiting("generations to end", on="this engine", limit_s=limit_s):
                async with asyncio.timeout(limit_s):
                    while self.instance.states and not (self.instance.pause.is_paused or self.instance.llm.errored):
                        await asyncio.sleep(_LOOK_S)  # wait: named by the block
        except BaseException:
            self.is_starting_again, self.out_of_service = False, before
            raise

    def write_to(self, counts: EngineCounts) -> None:
        """Set the counts that come from what makes policies ready and checks them."""
        counts.direct_transfers, counts.direct_fallbacks = self._cache.received, self._cache.fallbacks
        counts.canary_failures, counts.canary_seconds = self.canary.failures, self.canary.seconds

    def drain(self) -> contextlib.AbstractAsyncContextManager[None]:
        """In drain mode, wait until no lease is held, and give none in the block."""
        return contextlib.nullcontext() if self._leases is None else self._leases.drain()

    def _leave_service(self, policy: Policy) -> None:
        self.is_starting_again, self.out_of_service = True, f"{describe_policy(policy)} is loaded afresh"

    def _set_serving(self, policy: Policy) -> None:
        self.serving = policy
        self.out_of_service = ""


async def _complete(work: Coroutine[Any, Any, T]) -> T:
    """Do some work to its end, also where the caller is cancelled: weights that are replaced halfway are no policy."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])  # wait: the pause, or vLLM's start, is over in a moment
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()  # it is not lost: the engine says what it serves
        raise asyncio.CancelledError
    return task.result()
