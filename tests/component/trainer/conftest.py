"""A server that all tests share, and a feeder and a batcher."""

from feeding_bench import bench
from shared_redis import redis_server, shared_redis

__all__ = ["bench", "redis_server", "shared_redis"]
