"""What vLLM's scheduler says after each step: how full its KV cache is, and which sequences it evicted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forage_rollout.engine.engine_counts import EngineCounts

STILL_S = 6.0
"""A step takes well below a second on GPUs. Where one lasts so long, new requests go elsewhere meanwhile."""
_CLEARINGS_KEPT = 256
"""A request says that it was preempted with its next token, which may come many clearings later."""


class SchedulerWatch:
    """The numbers of the last step. vLLM evicts ("preempts") a sequence that runs where its cache has no block left.

    It also counts each running sequence as preempted when its cache is cleared, as for new weights and for a sleep.
    These are no evictions: they say nothing of the free memory of the cache, and are told apart by their time.
    """

    def __init__(self) -> None:
        self._evictions = self._tokens = 0
        self._usage = 0.0
        self._stepped_at = time.monotonic()
        self._cleared: deque[tuple[float, float]] = deque(maxlen=_CLEARINGS_KEPT)

    def build_logger_class(self) -> type:
        """A stat logger for `AsyncLLM`, which hands everything to this object.

        It counts as vLLM's logger for Prometheus: without one vLLM adds its own, which costs more than all else here.
        """
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        watch = self

        class StatLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not in the linter's environment
            def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
                cache = vllm_config.cache_config
                watch._tokens = (cache.num_gpu_blocks or 0) * cache.block_size

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                watch.record(scheduler_stats)

            def _ignore(self, *_: Any, **__: Any) -> None:
                pass

            log = log_engine_initialized = record_sleep_state = record_admission_rejection = _ignore

        return StatLogger

    def watch_outputs(self, processor: Any) -> None:
        """Count evictions in what vLLM's `OutputProcessor` is given from now on.

        vLLM's own sum of a step has lost when each preemption was.
        """
        process = processor.process_outputs

        def count_and_process(outputs: Sequence[Any], *arguments: Any, **named: Any) -> Any:
            self.count_evictions(outputs)
            return process(outputs, *arguments, **named)

        processor.process_outputs = count_and_process

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """Count no preemption within the `with` block, in which nothing is sampled and the cache is cleared."""
        # The times of events are those of the core's process: on one machine Linux has one monotonic clock.
        began = time.monotonic()
        try:
            yield
        finally:
            self._cleared.append((began, time.monotonic()))

    def record(self, scheduler: Any) -> None:
        """Keep the state after a step: vLLM's `SchedulerStats`, or None."""
        self._stepped_at = time.monotonic()
        if scheduler is not None:
            self._usage = scheduler.kv_cache_usage

    def count_evictions(self, outputs: Sequence[Any]) -> None:
        """Count the preemptions in vLLM's `EngineCoreOutput`s for which the cache was too small."""
        from vllm.v1.engine import EngineCoreEventType

        for output in outputs:
            for event in output.events or ():
                if event.type == EngineCoreEventType.PREEMPTED and not self._was_clearing(event.timestamp):
                    self._evictions += 1

    def _was_clearing(self, at: float) -> bool:
        return any(began <= at <= ended for began, ended in reversed(self._cleared))

    def stands_still(self, has_work: bool) -> bool:
        """Whether no step has ended for `STILL_S` although there is work; to be asked every second or so."""
        if not has_work:
            self._stepped_at = time.monotonic()
        return time.monotonic() - self._stepped_at > STILL_S

    def write_to(self, counts: EngineCounts, unfinished: int) -> None:
        """Set the counts that come from the scheduler.

        Args:
            unfinished: requests of the engine now; where the last were given up, no step follows that would say so.
        """
        counts.evictions = self._evictions
        counts.cache_tokens = self._tokens
        counts.cache_tokens_used = round(self._usage * self._tokens) if unfinished else 0
