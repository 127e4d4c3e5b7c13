#!/bin/sh
# redis-cli as the administrator, by the socket of start.sh: it needs no certificate, and works when those of the server
# have ended. The environment carries the password: command lines are visible to other processes.
REDISCLI_AUTH=$(head -n 1 "$PASSWORDS/forage-admin") exec redis-cli -s "${STATE:-/tmp}/redis.sock" --user forage-admin "$@"
