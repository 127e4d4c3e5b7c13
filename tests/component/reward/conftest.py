"""Reward services as processes."""

from reward_services import service, start, start_shared
from service_process import start_service

__all__ = ["service", "start", "start_service", "start_shared"]
