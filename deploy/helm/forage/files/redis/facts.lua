#!lua name=forage_server
redis.register_function{function_name = 'forage_server_appendfsync', flags = {'no-writes'}, callback = function(KEYS, ARGV)
return '@appendfsync@'
end}
