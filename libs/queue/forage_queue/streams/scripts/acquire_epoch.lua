#!lua flags=allow-oom
-- A fencing token above every earlier one: of this key, of the announced policy, and of the trainer's own files.
-- KEYS: epoch, policy.  ARGV: the highest epoch in the trainer's files.  Returns the new epoch.
local epoch = math.max(
  tonumber(redis.call('GET', KEYS[1]) or '0'),
  tonumber(redis.call('HGET', KEYS[2], 'epoch') or '0'),
  tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], epoch)
return epoch
