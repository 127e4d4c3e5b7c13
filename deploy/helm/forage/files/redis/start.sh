#!/bin/sh
# Starts Redis with a user for each program and the functions of this version, for compose and the chart.
# usage: start.sh [option of redis-server …]
# $PASSWORDS is a folder with a file for each user, whose lines are its passwords: programs send the first, and all are
# valid. The files are read again every $RELOAD_S seconds (5). A user without a file, or with an empty one, cannot log in.
set -eu
umask 077
here=$(dirname "$0")
users=/tmp/users.acl

list_users() {
  # Nobody can log in as default. Its rights stay: Redis reads its append-only file as this user, and where it has none
  # Redis 7.0 skips every transaction of the file, which are the groups of a run.
  echo 'user default off resetpass ~* &* +@all'
  while read -r user rules; do
    hashes=
    [ -r "$PASSWORDS/$user" ] || continue
    while read -r password || [ -n "$password" ]; do
      [ -z "$password" ] || hashes="$hashes #$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)"
    done < "$PASSWORDS/$user"
    [ -z "$hashes" ] || echo "user $user on$hashes $rules"
  done < "$here/users.rules"
}

ask() { sh "$here/cli.sh" "$@" 2>&1; }

# The functions come last: who finds them finds what CONFIG GET says too.
load_functions() {
  sync=$(ask CONFIG GET appendfsync | tail -n 1)
  case $sync in always|everysec|no) ;; *) return 1 ;; esac
  sed "s/@appendfsync@/$sync/" "$here/facts.lua" | ask -x FUNCTION LOAD REPLACE | grep -q '^forage_server$' || return 1
  answer=$(ask -x FUNCTION LOAD < "$here/functions.lua")
  case $answer in forage_*|*'already exists'*) ;; *) return 1 ;; esac
}

keep_current() {
  # The shell's process becomes the server's.
  until load_functions; do sleep 1; kill -0 $$ || exit; done
  while sleep "${RELOAD_S:-5}" && kill -0 $$; do
    fresh=$(list_users) || continue
    [ "$fresh" != "$known" ] || continue
    printf '%s\n' "$fresh" > "$users"
    answer=$(ask ACL LOAD) || true
    if [ "$answer" = OK ]; then
      known=$fresh
      echo 'the users were loaded again'
    else
      echo "the users were not loaded: $answer"
    fi
  done
}

[ -s "$PASSWORDS/forage-admin" ] || { echo "$PASSWORDS/forage-admin is missing: write the administrator's password to it" >&2; exit 2; }
known=$(list_users)
printf '%s\n' "$known" > "$users"
keep_current &
exec redis-server --aclfile "$users" "$@"
