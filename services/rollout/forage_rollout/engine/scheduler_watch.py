"""What vLLM's scheduler says after each step: how full its KV cache is, and which sequences it evicted."""

from __future__ import annotations

from typing import Any

from forage_rollout.engine.engine_counts import EngineCounts


class SchedulerWatch:
    """The numbers of the last step. vLLM evicts ("preempts") a sequence that runs where its cache has no block left."""

    def __init__(self) -> None:
        self._evictions = self._tokens = 0
        self._usage = 0.0

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

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                watch.record(scheduler_stats, iteration_stats)

            def _ignore(self, *_: Any, **__: Any) -> None:
                pass

            log = log_engine_initialized = record_sleep_state = record_admission_rejection = _ignore

        return StatLogger

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Keep the state after a step: vLLM's `SchedulerStats` and `IterationStats`, either of which may be None."""
        if scheduler is not None:
            self._usage = scheduler.kv_cache_usage
        if iteration is not None:
            self._evictions += iteration.num_preempted_reqs

    def write_to(self, counts: EngineCounts, unfinished: int) -> None:
        """Set the counts that come from the scheduler.

        Args:
            unfinished: requests of the engine now; where the last were given up, no step follows that would say so.
        """
        counts.evictions = self._evictions
        counts.cache_tokens = self._tokens
        counts.cache_tokens_used = round(self._usage * self._tokens) if unfinished else 0
