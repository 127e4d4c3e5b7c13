#!lua flags=allow-oom
-- A dispatcher says which environments it gives to data sources, until it is silent for too long.
-- KEYS: environments.  ARGV: table of environments, seconds.
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
