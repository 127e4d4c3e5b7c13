#!lua flags=allow-oom
-- The names of the files that entries of a stream refer to. What is noted of entries that are gone is forgotten.
-- KEYS: epoch, stream, files that its entries refer to.  ARGV: epoch.
--@fence
local found, names = redis.call('HGETALL', KEYS[3]), {}
for i = 1, #found, 2 do
  if #redis.call('XRANGE', KEYS[2], found[i], found[i]) > 0 then
    names[#names + 1] = found[i + 1]
  else
    redis.call('HDEL', KEYS[3], found[i])
  end
end
return names
