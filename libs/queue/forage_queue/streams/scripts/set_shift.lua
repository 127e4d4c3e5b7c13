#!lua flags=allow-oom
-- Who works on shared GPUs, unless its trainer was replaced and does not know it yet. Who watches learns of it.
-- KEYS: epoch, shift, announced.  ARGV: epoch, shift.
--@fence
redis.call('XLEN', KEYS[3]) -- fails on a key of another type before anything is written
redis.call('SET', KEYS[2], ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '1', '*', 'm', ARGV[1])
return 1
