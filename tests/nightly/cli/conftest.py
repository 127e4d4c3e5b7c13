"""Services for probes, and services as processes."""

from probe_parts import overrides, reward, scripted, settings
from service_process import start_service, wait_until_ready

__all__ = ["overrides", "reward", "scripted", "settings", "start_service", "wait_until_ready"]
