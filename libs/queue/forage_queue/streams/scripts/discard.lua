#!lua flags=allow-oom
-- Groups that are never trained on leave their stream. Returns the names of the files that they refer to.
-- KEYS: epoch, stream, files that its entries refer to.  ARGV: epoch, consumer group, entry ids …
--@fence
redis.call('HLEN', KEYS[3]) -- fails on a key of another type before anything is written
local names = {}
for i = 3, #ARGV do
  redis.call('XACK', KEYS[2], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
  local name = redis.call('HGET', KEYS[3], ARGV[i])
  if name then
    names[#names + 1] = name
    redis.call('HDEL', KEYS[3], ARGV[i])
  end
end
return names
