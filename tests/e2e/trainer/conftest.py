"""The trainer as a process."""

from trainer_process import trainer

__all__ = ["trainer"]
