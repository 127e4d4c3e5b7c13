-- Refuses a trainer that was replaced and does not know it yet: KEYS[1] has the epoch of the latest, ARGV[1] the caller's.
local epoch = redis.call('GET', KEYS[1])
if tonumber(epoch or '0') > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. epoch) end
