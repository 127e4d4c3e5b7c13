#!lua flags=allow-oom
-- A replica says which policy it serves and which it refuses, and that it is alive. Who watches learns of a change.
-- KEYS: replicas, replicas' last signs of life, served.  ARGV: replica, what it says.
redis.call('ZCARD', KEYS[2]) -- fails on a key of another type before anything is written
redis.call('XLEN', KEYS[3])
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('XADD', KEYS[3], 'MAXLEN', '1', '*', 'm', ARGV[1])
end
redis.call('ZADD', KEYS[2], redis.call('TIME')[1], ARGV[1])
return 1
