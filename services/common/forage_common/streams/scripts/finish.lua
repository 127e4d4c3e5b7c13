#!lua flags=allow-oom
-- A prompt is acknowledged and its group written, together. Returns 1, 0 where another worker has finished the prompt,
-- and 2 where nobody waits for the group any more.
-- KEYS: prompts, reply stream, trajectories.  ARGV: consumer group, entry id, group.
-- A key of another type fails here, before anything is written: Redis rolls nothing back.
redis.call('XLEN', KEYS[2])
-- XACK counts 0 when another worker has finished the entry: its group must not be written twice.
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
-- The stream of a validation that has ended must not come back.
if KEYS[2] ~= KEYS[3] and redis.call('EXISTS', KEYS[2]) == 0 then return 2 end
redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])
return 1
