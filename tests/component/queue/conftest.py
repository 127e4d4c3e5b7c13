"""A server that most tests share; the others ask for `own_redis`."""

from shared_redis import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]
