#!lua flags=allow-oom
-- A write of its own, for which replicas are waited for: the write before it may have been one of another connection.
-- KEYS: writes.
return redis.call('INCR', KEYS[1])
