"""The console and other services as processes."""

from service_process import start_service, wait_until_ready

__all__ = ["start_service", "wait_until_ready"]
