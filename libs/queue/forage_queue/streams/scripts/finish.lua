#!lua flags=allow-oom
-- A prompt is acknowledged and its group written, together. Returns 1, 0 where another worker has finished the prompt,
-- and 2 where nobody waits for the group any more.
-- KEYS: prompts, reply stream, trajectories, files that entries of the reply stream refer to, finished lately.
-- ARGV: consumer group, entry id, group, name of the file to which it refers (or empty), name of the call.
-- A key of another type fails here, before anything is written: Redis rolls nothing back.
redis.call('XLEN', KEYS[2])
redis.call('HLEN', KEYS[4])
redis.call('XLEN', KEYS[5])
-- XACK counts 0 when another worker has finished the entry: its group must not be written twice.
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  -- The other one was this call, and its reply or the word of its replicas was lost.
  for _, row in ipairs(redis.call('XRANGE', KEYS[5], '-', '+')) do
    if row[2][2] == ARGV[5] then return 1 end
  end
  return 0
end
redis.call('XDEL', KEYS[1], ARGV[2])
-- The stream of a validation that has ended must not come back.
if KEYS[2] ~= KEYS[3] and redis.call('EXISTS', KEYS[2]) == 0 then return 2 end
local id = redis.call('XADD', KEYS[2], '*', 'p', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[4], id, ARGV[4]) end
redis.call('XADD', KEYS[5], 'MAXLEN', '~', '1000', '*', 'm', ARGV[5])
return 1
