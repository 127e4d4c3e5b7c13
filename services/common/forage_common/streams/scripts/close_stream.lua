#!lua flags=allow-oom
-- A reply stream goes, together with the table of what was issued for it.
-- KEYS: epoch, stream, issue table.  ARGV: epoch.
--@fence
redis.call('DEL', KEYS[2], KEYS[3])
return 1
