"""Reward services as processes."""

from reward_services import start, start_shared, workers
from service_process import start_service

__all__ = ["start", "start_service", "start_shared", "workers"]
