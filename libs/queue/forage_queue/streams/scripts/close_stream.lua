#!lua flags=allow-oom
-- A reply stream goes, together with the table of what was issued for it. Returns the names of the files that its
-- entries refer to.
-- KEYS: epoch, stream, issue table, files that entries refer to.  ARGV: epoch.
--@fence
local names = redis.call('HVALS', KEYS[4])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
return names
