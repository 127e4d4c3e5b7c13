"""One AsyncLLM with all that belongs to it. An engine that loads a policy afresh replaces its instance by another."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forage_rollout.engine.generation_pause import GenerationPause
from forage_rollout.engine.scheduler_watch import SchedulerWatch
from forage_rollout.vllm_start.fork_server import use_own_processes
from forage_rollout.vllm_start.vllm_args import build_arguments, build_environment, is_exact
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger
from forage_weights.rollout.adapter import Adapters
from forage_weights.rollout.canary import CanaryBounds
from forage_weights.rollout.preparation import Stager
from forage_weights.tensors import SUFFIX

log = get_logger()
T = TypeVar("T")
_NO_STATES = "Chunked prefill is required for mamba cache mode"
"""Of vLLM's error about a model with states, whose prefixes it caches only where it may split prompts: not on a CPU."""
_WEIGHTS = (SUFFIX, ".bin", ".gguf", ".index.json", ".pt", ".pth")


class Instance:
    """Starts vLLM; it may be built by any thread, and is used in one event loop.

    Attributes:
        llm: vLLM's AsyncLLM.
        bounds: what its log-probabilities may differ by from the trainer's.

    Args:
        folder: with the model's configuration, tokenizer and weights.

    Raises:
        SettingsError: as `build_arguments`.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        os.environ.update(build_environment(settings.rollout.engine))
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        use_own_processes()
        # vLLM reads configuration and tokenizer again later, as for its routes, when `folder` may be gone.
        model = str(settings.model.path.resolve())
        arguments = {"hf_config_path": model, "tokenizer": model}
        arguments |= build_arguments(settings, bool(current_platform.is_cpu())) | {"model": str(folder)}
        self.watch = SchedulerWatch()
        start = partial(AsyncLLM.from_engine_args, stat_loggers=[self.watch.build_logger_class()])
        self.llm: Any = start_with(arguments, start)
        self.watch.watch_outputs(self.llm.output_processor)
        self.adapters = Adapters(self.llm)
        self.pause = GenerationPause(self.llm, self.watch)
        self.stager = Stager(self.llm)
        self.bounds = CanaryBounds(self.dtype, is_exact(settings.rollout.engine))

    @property
    def dtype(self) -> str:
        """What the engine computes in, as PyTorch names it: vLLM decides what `auto` is."""
        return str(self.llm.model_config.dtype).removeprefix("torch.")

    @property
    def states(self) -> Any:
        """vLLM's states of the requests that have not ended, by id."""
        return self.llm.output_processor.request_states

    async def retire(self) -> None:
        """End all requests without a result, and the processes; `shutdown` may follow once another one has started."""
        await self.llm.abort([*self.states], internal=True)
        if self.llm.output_handler is not None:  # it would report that the processes have ended
            self.llm.output_handler.cancel()
        self.kill()

    def kill(self) -> None:
        """Kill its processes: running and later requests fail."""
        for process in self.llm.engine_core.resources.engine_manager.processes:
            process.kill()

    def shutdown(self) -> None:
        """End its processes; a second call does nothing."""
        llm = self.__dict__.pop("llm", None)
        if llm is not None:
            del self.adapters, self.pause, self.stager  # the last references to it
            llm.shutdown()


def start_with(arguments: Mapping[str, Any], start: Callable[[Any], T]) -> T:
    """Start vLLM with arguments; without its prefix cache where it cannot have one for this model.

    Args:
        start: takes vLLM's AsyncEngineArgs.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        return start(AsyncEngineArgs(**arguments))
    except Exception as error:
        if _NO_STATES not in str(error) or "enable_prefix_caching" in arguments:
            raise
    log.warning("prefix_cache_off", reason="vLLM caches no prefixes of a model with states on a CPU")
    return start(AsyncEngineArgs(**arguments, enable_prefix_caching=False))


@contextlib.contextmanager
def lay_out_model(model: Path, weights: Iterable[Path]) -> Iterator[Path]:
    """A folder that has a model's configuration and tokenizer, and other weights, all by links; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="forage-policy-") as name:
        folder = Path(name)
        for file in model.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                (folder / file.name).symlink_to(file.resolve())
        for file in weights:
            (folder / file.name).symlink_to(file.resolve())
        yield folder
