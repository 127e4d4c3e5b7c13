#!lua flags=allow-oom
-- The consumer group of a stream, from its beginning, unless it exists. Answers are lost with a stream: where it is new,
-- so is the table of what was issued for it.
-- KEYS: stream, epoch (of a trainer alone), issue table of the stream (optional).  ARGV: consumer group, epoch.
if KEYS[2] then -- as fence.lua; a worker is not replaced
  local epoch = redis.call('GET', KEYS[2])
  if tonumber(epoch or '0') > tonumber(ARGV[2]) then return redis.error_reply('FENCED ' .. epoch) end
end
if KEYS[3] and redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[3]) end
local reply = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if type(reply) == 'table' and reply.err and not string.find(reply.err, 'BUSYGROUP') then return reply end
return 1
