#!lua flags=no-writes
-- The policy that each replica serves, of those that gave a sign of life lately: replica, policy, …
-- KEYS: replicas, replicas' last signs of life.  ARGV: silence in seconds.
local found = {}
for _, replica in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], redis.call('TIME')[1] - ARGV[1], '+inf')) do
  found[#found + 1] = replica
  found[#found + 1] = redis.call('HGET', KEYS[1], replica)
end
return found
