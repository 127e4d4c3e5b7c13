"""verl's FSDP2 engines on GPUs, computing as `scoring` says."""

from __future__ import annotations

from verl.workers.engine import EngineRegistry

from forage_trainer.engine.scoring import ScoringEngine, ValueEngine

_VENDORS = ["nvidia", "amd"]
"""verl prefers an engine of the machine's vendor to its own."""


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor=_VENDORS)  # type: ignore[untyped-decorator, unused-ignore]
class GpuEngine(ScoringEngine):
    """The engine of language models."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cuda", vendor=_VENDORS)  # type: ignore[untyped-decorator, unused-ignore]
class GpuValueEngine(ValueEngine):
    """The engine of value models."""
