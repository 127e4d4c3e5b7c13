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
