#!lua flags=allow-oom
-- A (batch, position, attempt) of a reply stream enters the prompts stream once, however often it is issued.
-- KEYS: epoch, prompts, issue table, ledger.  ARGV: epoch, "position/attempt", uid, prompt, step that will consume it.
--@fence
-- The table of a batch that was acknowledged is gone; the ledger remembers it.
if ARGV[5] ~= '' and redis.call('HEXISTS', KEYS[4], ARGV[5]) == 1 then return 0 end
if redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then return 0 end
local id = redis.call('XADD', KEYS[2], '*', 'm', ARGV[4])
redis.call('HSET', KEYS[3], ARGV[2], id .. ' ' .. ARGV[3])
return 1
