#!lua flags=allow-oom
-- A shift replaces the one that the caller knows. Who watches learns of a new one, not of a sign of life.
-- KEYS: shift, announced.  ARGV: the shift before, the shift, whether it is a new one.
redis.call('XLEN', KEYS[2]) -- fails on a key of another type before anything is written
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] == '1' then redis.call('XADD', KEYS[2], 'MAXLEN', '1', '*', 'm', '') end
return 1
