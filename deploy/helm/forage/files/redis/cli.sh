#!/bin/sh
# redis-cli as the administrator, by the socket of start.sh: it needs no certificate, and works when those of the server
# have ended. The environment carries the password: command lines are visible to other processes.
# It is the first line that is not blank, without blanks around it and carriage returns, as start.sh reads it.
REDISCLI_AUTH=$(tr -d '\r' < "$PASSWORDS/forage-admin" | sed -n '/[^[:blank:]]/{s/^[[:blank:]]*//;s/[[:blank:]]*$//;p;q;}') \
  exec redis-cli -s "${STATE:-/tmp}/redis.sock" --user forage-admin "$@"
