"""A server that all tests share, and the trainer as a process."""

from shared_redis import redis_server, shared_redis
from trainer_process import trainer

__all__ = ["redis_server", "shared_redis", "trainer"]
