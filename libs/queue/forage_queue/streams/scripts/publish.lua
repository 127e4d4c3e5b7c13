#!lua flags=allow-oom
-- A policy replaces the current one, unless its trainer was replaced and does not know it yet. Who watches learns of it.
-- KEYS: epoch, policy, announced, served.  ARGV: epoch, policy.
--@fence
-- A key of another type fails here, before anything is written.
redis.call('HLEN', KEYS[2])
redis.call('XLEN', KEYS[3])
redis.call('XLEN', KEYS[4])
-- After a loss of the server's data the key is missing, and this trainer is still the latest.
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'm', ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '1', '*', 'm', ARGV[1])
redis.call('XADD', KEYS[4], 'MAXLEN', '1', '*', 'm', '')
return 1
