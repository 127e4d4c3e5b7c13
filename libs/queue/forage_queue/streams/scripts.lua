-- The rules of the streams: a script each, which Redis runs atomically. `functions.py` reads this file: a script begins
-- after its `--@script` line with its flags; `--@fence` in it stands for the lines of `fence`.

--@script fence
-- Refuses a trainer that was replaced and does not know it yet: KEYS[1] has the epoch of the latest, ARGV[1] the caller's.
local epoch = redis.call('GET', KEYS[1])
if tonumber(epoch or '0') > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. epoch) end

--@script acquire_epoch
#!lua flags=allow-oom
-- A fencing token above every earlier one: of this key, of the announced policy, and of the trainer's own files.
-- KEYS: epoch, policy.  ARGV: the highest epoch in the trainer's files.  Returns the new epoch.
local epoch = math.max(
  tonumber(redis.call('GET', KEYS[1]) or '0'),
  tonumber(redis.call('HGET', KEYS[2], 'epoch') or '0'),
  tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], epoch)
return epoch

--@script create_group
#!lua flags=allow-oom
-- The consumer group of a stream, from its beginning, unless it exists. Answers are lost with a stream: where it is new,
-- so is the table of what was issued for it.
-- KEYS: stream, epoch (of a trainer alone), issue table of the stream (optional).  ARGV: consumer group, epoch.
if KEYS[2] then -- as `fence`; a worker is not replaced
  local epoch = redis.call('GET', KEYS[2])
  if tonumber(epoch or '0') > tonumber(ARGV[2]) then return redis.error_reply('FENCED ' .. epoch) end
end
if KEYS[3] and redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[3]) end
local reply = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if type(reply) == 'table' and reply.err and not string.find(reply.err, 'BUSYGROUP') then return reply end
return 1

--@script issue
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

--@script find_absent
#!lua flags=no-writes
-- The issues whose prompt is no longer on the stream: finished, or lost. Returns the fields of the table.
-- KEYS: prompts, issue table.
local absent = {}
local issues = redis.call('HGETALL', KEYS[2])
for i = 1, #issues, 2 do
  local id = string.match(issues[i + 1], '^%S+')
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then absent[#absent + 1] = issues[i] end
end
return absent

--@script finish
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

--@script reclaim
#!lua flags=allow-oom
-- Groups that another process of the trainer claimed, or whose delivery was lost, become this one's.
-- KEYS: epoch, stream.  ARGV: epoch, consumer group, consumer, entry ids …  Returns the entries.
--@fence
return redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[3], 0, unpack(ARGV, 4))

--@script reject
#!lua flags=allow-oom
-- An entry that nobody can use leaves its stream; a copy is kept for diagnosis. A repeated call changes nothing. Returns
-- the name of the file that it refers to, if it does.
-- KEYS: stream, rejected, files that entries of the stream refer to, epoch (of a trainer alone).
-- ARGV: consumer group, entry id, content, copies kept, epoch.
if KEYS[4] then -- as `fence`; a worker is not replaced
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

--@script acknowledge
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

--@script discard
#!lua flags=allow-oom
-- Groups that are never trained on leave their stream. Returns the names of the files that they refer to.
-- KEYS: epoch, stream, files that its entries refer to.  ARGV: epoch, consumer group, entry ids …
--@fence
redis.call('HLEN', KEYS[3]) -- fails on a key of another type before anything is written
local names = {}
for i = 3, #ARGV do
  redis.call('XACK', KEYS[2], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
  local name = redis.call('HGET', KEYS[3], ARGV[i])
  if name then
    names[#names + 1] = name
    redis.call('HDEL', KEYS[3], ARGV[i])
  end
end
return names

--@script close_stream
#!lua flags=allow-oom
-- A reply stream goes, together with the table of what was issued for it. Returns the names of the files that its
-- entries refer to.
-- KEYS: epoch, stream, issue table, files that entries refer to.  ARGV: epoch.
--@fence
local names = redis.call('HVALS', KEYS[4])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
return names

--@script offer_payloads
#!lua flags=allow-oom
-- How writers recognise the place from which the trainer reads files of groups; repeated, since a server may lose it.
-- KEYS: epoch, mark of the place.  ARGV: epoch, mark.
--@fence
-- After a loss of the server's data the key is missing, and this trainer is still the latest.
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
return 1

--@script list_stored
#!lua flags=allow-oom
-- The names of the files that entries of a stream refer to. What is noted of entries that are gone is forgotten.
-- KEYS: epoch, stream, files that its entries refer to.  ARGV: epoch.
--@fence
local found, names = redis.call('HGETALL', KEYS[3]), {}
for i = 1, #found, 2 do
  if #redis.call('XRANGE', KEYS[2], found[i], found[i]) > 0 then
    names[#names + 1] = found[i + 1]
  else
    redis.call('HDEL', KEYS[3], found[i])
  end
end
return names

--@script publish
#!lua flags=allow-oom
-- A policy replaces the current one, unless its trainer was replaced and does not know it yet. Who watches learns of it.
-- KEYS: epoch, policy, announced, served.  ARGV: epoch, policy.
--@fence
-- A key of another type fails here, before anything is written.
redis.call('HLEN', KEYS[2])
redis.call('XLEN', KEYS[3])
redis.call('XLEN', KEYS[4])
-- After a loss of the server's data the key is missing, and this trainer is still the latest.
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'm', ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '1', '*', 'm', ARGV[1])
redis.call('XADD', KEYS[4], 'MAXLEN', '1', '*', 'm', '')
return 1

--@script acknowledge_policy
#!lua flags=allow-oom
-- A replica says which policy it serves and which it refuses, and that it is alive. Who watches learns of a change.
-- KEYS: replicas, replicas' last signs of life, served.  ARGV: replica, what it says.
redis.call('ZCARD', KEYS[2]) -- fails on a key of another type before anything is written
redis.call('XLEN', KEYS[3])
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('XADD', KEYS[3], 'MAXLEN', '1', '*', 'm', ARGV[1])
end
redis.call('ZADD', KEYS[2], redis.call('TIME')[1], ARGV[1])
return 1

--@script read_replicas
#!lua flags=no-writes
-- The policy that each replica serves, of those that gave a sign of life lately: replica, policy, …
-- KEYS: replicas, replicas' last signs of life.  ARGV: silence in seconds.
local found = {}
for _, replica in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], redis.call('TIME')[1] - ARGV[1], '+inf')) do
  found[#found + 1] = replica
  found[#found + 1] = redis.call('HGET', KEYS[1], replica)
end
return found

--@script set_shift
#!lua flags=allow-oom
-- Who works on shared GPUs, unless its trainer was replaced and does not know it yet. Who watches learns of it.
-- KEYS: epoch, shift, announced.  ARGV: epoch, shift.
--@fence
redis.call('XLEN', KEYS[3]) -- fails on a key of another type before anything is written
redis.call('SET', KEYS[2], ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '1', '*', 'm', ARGV[1])
return 1

--@script replace_shift
#!lua flags=allow-oom
-- A shift replaces the one that the caller knows. Who watches learns of a new one, not of a sign of life.
-- KEYS: shift, announced.  ARGV: the shift before, the shift, whether it is a new one.
redis.call('XLEN', KEYS[2]) -- fails on a key of another type before anything is written
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] == '1' then redis.call('XADD', KEYS[2], 'MAXLEN', '1', '*', 'm', '') end
return 1

--@script declare_environments
#!lua flags=allow-oom
-- A dispatcher says which environments it gives to data sources, until it is silent for too long.
-- KEYS: environments.  ARGV: table of environments, seconds.
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1

--@script prune
#!lua flags=allow-oom
-- Replicas and consumers that are gone: both tables would grow with every restart.
-- KEYS: epoch, replicas, replicas' last signs of life, streams …
-- ARGV: epoch, consumer group, a replica's silence in seconds, a consumer's in milliseconds.
--@fence
local latest = redis.call('TIME')[1] - ARGV[3]
for _, replica in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. latest)) do
  redis.call('HDEL', KEYS[2], replica)
  redis.call('ZREM', KEYS[3], replica)
end
for i = 4, #KEYS do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], ARGV[2])
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local fields = {}
    for j = 1, #consumer, 2 do fields[consumer[j]] = consumer[j + 1] end
    if fields.pending == 0 and fields.idle > tonumber(ARGV[4]) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[2], fields.name)
    end
  end
end
return 1

--@script touch
#!lua flags=allow-oom
-- A write of its own, for which replicas are waited for: the write before it may have been one of another connection.
-- KEYS: writes.
return redis.call('INCR', KEYS[1])
