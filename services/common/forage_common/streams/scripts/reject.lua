#!lua flags=allow-oom
-- An entry that nobody can use leaves its stream; a copy is kept for diagnosis. Returns the name of the file that it
-- refers to, if it does.
-- KEYS: stream, rejected, files that entries of the stream refer to.
-- ARGV: consumer group, entry id, content, copies kept.
-- A key of another type fails here, before anything is written.
redis.call('XLEN', KEYS[1])
redis.call('HLEN', KEYS[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'stream', KEYS[1], 'content', ARGV[3])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
local name = redis.call('HGET', KEYS[3], ARGV[2])
if not name then return {} end
redis.call('HDEL', KEYS[3], ARGV[2])
return {name}
