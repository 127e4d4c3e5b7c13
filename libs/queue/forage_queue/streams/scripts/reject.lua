#!lua flags=allow-oom
-- An entry that nobody can use leaves its stream; a copy is kept for diagnosis. A repeated call changes nothing. Returns
-- the name of the file that it refers to, if it does.
-- KEYS: stream, rejected, files that entries of the stream refer to, epoch (of a trainer alone).
-- ARGV: consumer group, entry id, content, copies kept, epoch.
if KEYS[4] then -- as fence.lua; a worker is not replaced
  local epoch = redis.call('GET', KEYS[4])
  if tonumber(epoch or '0') > tonumber(ARGV[5]) then return redis.error_reply('FENCED ' .. epoch) end
end
-- A key of another type fails here, before anything is written.
redis.call('XLEN', KEYS[1])
redis.call('XLEN', KEYS[2])
redis.call('HLEN', KEYS[3])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
if redis.call('XDEL', KEYS[1], ARGV[2]) == 1 then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'stream', KEYS[1], 'content', ARGV[3])
end
local name = redis.call('HGET', KEYS[3], ARGV[2])
if not name then return {} end
redis.call('HDEL', KEYS[3], ARGV[2])
return {name}
