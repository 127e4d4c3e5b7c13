#!lua flags=allow-oom
-- A (batch, position, attempt) of a reply stream enters the prompts stream once, however often it is issued.
-- KEYS: epoch, prompts, issue table, issued.  ARGV: epoch, "position/attempt", uid, prompt, batch (empty: no training).
--@fence
-- The table of a batch that is over is gone; it is remembered among those that were issued.
if ARGV[5] ~= '' and redis.call('HEXISTS', KEYS[4], ARGV[5]) == 1 then return 0 end
if redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then return 0 end
local id = redis.call('XADD', KEYS[2], '*', 'm', ARGV[4])
redis.call('HSET', KEYS[3], ARGV[2], id .. ' ' .. ARGV[3])
return 1
