#!lua flags=allow-oom
-- The consumer group of a stream, from its beginning, unless it exists. Answers are lost with a stream: where it is new,
-- so is the table of what was issued for it.
-- KEYS: stream, its issue table (optional).  ARGV: consumer group.
if KEYS[2] and redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
local reply = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if type(reply) == 'table' and reply.err and not string.find(reply.err, 'BUSYGROUP') then return reply end
return 1
