#!lua flags=allow-oom
-- A replica says which policy it serves, and that it is alive.
-- KEYS: replicas, replicas' last signs of life.  ARGV: replica, policy.
redis.call('ZCARD', KEYS[2]) -- fails on a key of another type before anything is written
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], redis.call('TIME')[1], ARGV[1])
return 1
