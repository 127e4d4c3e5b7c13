"""Services for probes."""

from probe_parts import overrides, reward, scripted, settings

__all__ = ["overrides", "reward", "scripted", "settings"]
