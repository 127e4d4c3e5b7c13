#!/bin/sh
# Starts Redis with a user for each program and the functions of this version, for compose and the chart.
# usage: start.sh [option of redis-server …]
# $PASSWORDS is a folder with a file for each user, whose lines are its passwords: programs send the first, and all are
# valid. The files are read again every $RELOAD_S seconds (5). A user without a file, or with an empty one, cannot log in.
# Where $TLS_CERT, $TLS_KEY and $TLS_CA name PEM files, the server speaks TLS alone, asks its clients for certificates unless
# $TLS_AUTH_CLIENTS is no, and takes files that change as it takes passwords. cli.sh needs none: it uses a socket in $STATE.
set -eu
umask 077
here=$(dirname "$0")
STATE=${STATE:-/tmp}
export STATE
users=$STATE/users.acl
return=$(printf '\r')

list_users() {
  # Nobody can log in as default. Its rights stay: Redis reads its append-only file as this user, and where it has none
  # Redis 7.0 skips every transaction of the file, which are the groups of a run.
  echo 'user default off resetpass ~* &* +@all'
  while read -r user rules; do
    hashes=
    [ -r "$PASSWORDS/$user" ] || continue
    while read -r password || [ -n "$password" ]; do
      password=${password%"$return"}
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

hash_certificates() { [ -z "${TLS_CERT:-}" ] || cat "$TLS_CERT" "$TLS_KEY" "$TLS_CA" | sha256sum; }

# Files that do not fit together, such as a new key beside an old certificate, leave the last good ones in use.
reload_certificates() {
  fresh=$(hash_certificates 2>/dev/null) && [ "$fresh" != "$shown" ] || return 0
  answer=$(ask CONFIG SET tls-cert-file "$TLS_CERT" tls-key-file "$TLS_KEY" tls-ca-cert-file "$TLS_CA") || true
  if [ "$answer" = OK ]; then
    shown=$fresh refused=
    echo 'the certificates were loaded again'
  elif [ "$fresh" != "$refused" ]; then
    refused=$fresh
    echo "the certificates were not loaded: $answer"
  fi
}

keep_current() {
  # The shell's process becomes the server's.
  until load_functions; do sleep 1; kill -0 $$ || exit; done
  while sleep "${RELOAD_S:-5}" && kill -0 $$; do
    reload_certificates
    fresh=$(list_users) || continue
    [ "$fresh" != "$known" ] || continue
    # A file that is being written may be empty: without its administrator nobody could load the users ever again.
    case $fresh in *'user forage-admin on'*) ;; *) echo "the users were not loaded: forage-admin has no password"; continue ;; esac
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
refused=
if [ -n "${TLS_CERT:-}" ]; then
  for file in "$TLS_CERT" "${TLS_KEY:-}" "${TLS_CA:-}"; do
    [ -r "$file" ] || { echo "'$file' cannot be read: give PEM files in TLS_CERT, TLS_KEY and TLS_CA" >&2; exit 2; }
  done
  set -- --port 0 --tls-port 6379 --tls-cert-file "$TLS_CERT" --tls-key-file "$TLS_KEY" --tls-ca-cert-file "$TLS_CA" \
    --tls-auth-clients "${TLS_AUTH_CLIENTS:-yes}" "$@"
fi
shown=$(hash_certificates)
known=$(list_users)
printf '%s\n' "$known" > "$users"
keep_current &
exec redis-server --aclfile "$users" --unixsocket "$STATE/redis.sock" "$@"
