#!lua flags=allow-oom
-- Groups that are never trained on leave their stream.
-- KEYS: epoch, stream.  ARGV: epoch, consumer group, entry ids …
--@fence
for i = 3, #ARGV do
  redis.call('XACK', KEYS[2], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
end
return 1
