#!lua flags=allow-oom
-- How writers recognise the place from which the trainer reads files of groups; repeated, since a server may lose it.
-- KEYS: epoch, mark of the place.  ARGV: epoch, mark.
--@fence
-- After a loss of the server's data the key is missing, and this trainer is still the latest.
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
return 1
