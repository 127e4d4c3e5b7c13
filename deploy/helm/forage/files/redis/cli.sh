#!/bin/sh
# redis-cli as the administrator. The environment carries the password: command lines are visible to other processes.
REDISCLI_AUTH=$(head -n 1 "$PASSWORDS/forage-admin") exec redis-cli --user forage-admin "$@"
