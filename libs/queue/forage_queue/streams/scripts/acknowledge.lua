#!lua flags=allow-oom
-- The groups of a step leave the stream and the step enters the ledger. A repeated call changes nothing. Returns the
-- names of the files that the groups refer to.
-- KEYS: epoch, trajectories, ledger, issued, files that entries refer to, the issue table of each batch that is over …
-- ARGV: epoch, consumer group, step, ledger entry, number of these batches, the batches …, entry ids …
--@fence
-- A key of another type fails here, before anything is written: Redis rolls nothing back.
redis.call('XLEN', KEYS[2])
redis.call('HLEN', KEYS[3])
redis.call('HLEN', KEYS[4])
redis.call('HLEN', KEYS[5])
local texts = {}
for i = 6, #KEYS do
  local issues, lines = redis.call('HGETALL', KEYS[i]), {}
  for j = 1, #issues, 2 do
    lines[#lines + 1] = issues[j] .. ' ' .. (string.match(issues[j + 1], ' (.*)$') or '')
  end
  texts[i] = table.concat(lines, '\n')
end
redis.call('HSETNX', KEYS[3], ARGV[3], ARGV[4])
-- From now on this says that the batch was issued, with what was issued for it, for the final count.
for i = 6, #KEYS do
  redis.call('HSETNX', KEYS[4], ARGV[i], texts[i])
  redis.call('DEL', KEYS[i])
end
local names = {}
for i = 6 + tonumber(ARGV[5]), #ARGV do
  redis.call('XACK', KEYS[2], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
  local name = redis.call('HGET', KEYS[5], ARGV[i])
  if name then
    names[#names + 1] = name
    redis.call('HDEL', KEYS[5], ARGV[i])
  end
end
return names
