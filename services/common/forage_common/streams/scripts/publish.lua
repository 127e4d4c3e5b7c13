#!lua flags=allow-oom
-- A policy replaces the current one, unless its trainer was replaced and does not know it yet.
-- KEYS: epoch, policy.  ARGV: epoch, policy.
--@fence
redis.call('HLEN', KEYS[2]) -- fails on a key of another type before anything is written
-- After a loss of the server's data the key is missing, and this trainer is still the latest.
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'm', ARGV[2])
return 1
