#!lua flags=allow-oom
-- Replicas and consumers that are gone: both tables would grow with every restart.
-- KEYS: epoch, replicas, replicas' last signs of life, streams …
-- ARGV: epoch, consumer group, a replica's silence in seconds, a consumer's in milliseconds.
--@fence
local latest = redis.call('TIME')[1] - ARGV[3]
for _, replica in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. latest)) do
  redis.call('HDEL', KEYS[2], replica)
  redis.call('ZREM', KEYS[3], replica)
end
for i = 4, #KEYS do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], ARGV[2])
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local fields = {}
    for j = 1, #consumer, 2 do fields[consumer[j]] = consumer[j + 1] end
    if fields.pending == 0 and fields.idle > tonumber(ARGV[4]) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[2], fields.name)
    end
  end
end
return 1
