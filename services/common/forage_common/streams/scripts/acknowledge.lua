#!lua flags=allow-oom
-- The groups of a step leave the stream and the step enters the ledger. A repeated call changes nothing. Returns the
-- names of the files that the groups refer to.
-- KEYS: epoch, trajectories, ledger, the batch's issue table, issued, files that entries refer to.
-- ARGV: epoch, consumer group, step, ledger entry, entry ids …
--@fence
-- A key of another type fails here, before anything is written: Redis rolls nothing back.
redis.call('XLEN', KEYS[2])
redis.call('HLEN', KEYS[5])
redis.call('HLEN', KEYS[6])
local issues, lines = redis.call('HGETALL', KEYS[4]), {}
for i = 1, #issues, 2 do
  lines[#lines + 1] = issues[i] .. ' ' .. (string.match(issues[i + 1], ' (.*)$') or '')
end
redis.call('HSETNX', KEYS[3], ARGV[3], ARGV[4])
-- From now on the ledger says that the batch was issued; only what was issued for it stays, for the final count.
if #lines > 0 then
  redis.call('HSETNX', KEYS[5], ARGV[3], table.concat(lines, '\n'))
  redis.call('DEL', KEYS[4])
end
local names = {}
for i = 5, #ARGV do
  redis.call('XACK', KEYS[2], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
  local name = redis.call('HGET', KEYS[6], ARGV[i])
  if name then
    names[#names + 1] = name
    redis.call('HDEL', KEYS[6], ARGV[i])
  end
end
return names
