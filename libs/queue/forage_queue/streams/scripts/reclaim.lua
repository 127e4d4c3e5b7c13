#!lua flags=allow-oom
-- Groups that another process of the trainer claimed, or whose delivery was lost, become this one's.
-- KEYS: epoch, stream.  ARGV: epoch, consumer group, consumer, entry ids …  Returns the entries.
--@fence
return redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[3], 0, unpack(ARGV, 4))
