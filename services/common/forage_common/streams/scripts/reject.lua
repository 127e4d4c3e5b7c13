#!lua flags=allow-oom
-- An entry that nobody can use leaves its stream; a copy is kept for diagnosis.
-- KEYS: stream, rejected.  ARGV: consumer group, entry id, content, copies kept.
redis.call('XLEN', KEYS[1]) -- fails on a key of another type before anything is written
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'stream', KEYS[1], 'content', ARGV[3])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
