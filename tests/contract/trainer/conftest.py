"""Services for probes in training."""

from probing_parts import sampler, scripted, settings, shared

__all__ = ["sampler", "scripted", "settings", "shared"]
