#!/usr/bin/env bash
# Runs the stack of docker-compose.yml on this machine.
# usage: compose.sh up [option of docker compose up …]     create missing secrets and images, start, wait, print addresses
#        [TLS=1] compose.sh up …                           the same with TLS and client certificates on every wire
#        [HARDENED=1] compose.sh up …                      the same with TLS, signed policies and the profile hardened
#        [VOLUMES=1] compose.sh down                       VOLUMES=1 also deletes the volumes
#        [SERVICE=trainer] compose.sh logs
#        compose.sh rotate                                 replaces the passwords of Redis while the stack runs
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "compose: $*" >&2; exit 2; }

require_docker() {
  command -v docker >/dev/null || fail "docker is missing: install Docker 20.10 or later with its Compose plugin"
  docker info >/dev/null 2>&1 || fail "no Docker engine answers ($(docker info 2>&1 | tail -n 1)): start it, or set DOCKER_HOST"
  local version
  version=$(docker compose version --short 2>/dev/null) || fail "docker has no Compose: install its plugin, version 2.24 or later"
  [ "$(printf '%s\n' 2.24 "${version#v}" | sort -V | head -n 1)" = 2.24 ] || fail "the version of Compose is $version, expected 2.24 or later"
  docker compose config --quiet
}

make_secret() { head -c 512 /dev/urandom | LC_ALL=C tr -dc 'A-Za-z0-9' | head -c 40; echo; }

# The files are readable by the users of the containers; the folder keeps other users of this machine out.
create_secrets() {
  local folder=deploy/compose/secrets name
  mkdir -p "$folder" && chmod 700 "$folder"
  for name in redis-trainer redis-rollout redis-cli redis-console redis-exporter redis-admin retriever-token reward-token rollout-token console-token grafana-password; do
    [ -s "$folder/$name" ] || make_secret > "$folder/$name"
    chmod 644 "$folder/$name"
  done
}

# Redis reads its users' files every five seconds, and programs read theirs at each connect; both by the same file, which
# is changed in place. First every user has two passwords, then the new one alone.
rotate() {
  local file newest
  for file in deploy/compose/secrets/redis-*; do make_secret >> "$file"; done
  sleep 15
  for file in deploy/compose/secrets/redis-*; do newest=$(tail -n 1 "$file"); echo "$newest" > "$file"; done
  echo "the passwords of Redis were replaced; the exporter takes its new one when it is restarted: docker compose restart exporter"
}

# Makes an authority and a certificate for each service, and renews those that end within a month.
create_certificates() {
  local folder=deploy/compose/secrets/tls
  scripts/setup.sh cli
  .venvs/cli/bin/python scripts/compose_certificates.py "$folder" forage retriever reward rollout trainer console redis exporter prometheus ||
    fail "the certificates could not be made (see above)"
  find "$folder" -mindepth 1 -type d ! -name authority -exec chmod 755 {} + -exec sh -c 'chmod 644 "$0"/*' {} \;
}

# Makes the key pair of signatures. The trainer refuses a private key that others than its owner and its group can read,
# and runs as a user of its own: it gets the group of the file, which is yours.
create_keys() {
  local folder=deploy/compose/secrets/signing
  if [ ! -e "$folder/signing-key.pem" ]; then
    scripts/setup.sh cli
    .venvs/cli/bin/forage security keys "$folder" || fail "the signing keys could not be made (see above)"
  fi
  chgrp "$(id -g)" "$folder/signing-key.pem" && chmod 640 "$folder/signing-key.pem" && chmod 644 "$folder/verify-key.pem" ||
    fail "the signing keys in $folder are not yours: make them readable by your group $(id -gn) and by nobody else"
}

# Builds only images without a registry in their name: Docker pulls the others.
build_images() {
  local image name cpu=() gpu=()
  for image in $(docker compose config --images | grep -E '^forage/' | sort -u); do
    docker image inspect "$image" >/dev/null 2>&1 && continue
    name=${image#forage/} name=${name%%:*}
    case $image in *-gpu) gpu+=("$name") ;; *) cpu+=("$name") ;; esac
  done
  [ ${#cpu[@]} = 0 ] || SERVICES="${cpu[*]}" scripts/images.sh
  [ ${#gpu[@]} = 0 ] || GPU=1 SERVICES="${gpu[*]}" scripts/images.sh
}

# `up --wait` is no alternative: it treats a trainer that has finished as a failure.
wait_until_ready() {
  local states stuck
  while :; do
    states=$(docker compose ps --all --format '{{.Service}}|{{.State}}|{{.Health}}|{{.ExitCode}}')
    if stuck=$(grep -E '\|(restarting|dead)\||\|unhealthy\||\|exited\|.*\|[1-9]' <<< "$states"); then
      docker compose ps --all >&2
      docker compose logs --tail 30 "${stuck%%|*}" >&2
      fail "${stuck%%|*} does not become ready (its log is above); for the whole log run: make logs SERVICE=${stuck%%|*}"
    fi
    grep -qE '\|created\||\|starting\|' <<< "$states" || return 0
    sleep 1
  done
}

up() {
  local scheme=http
  create_secrets
  if [ -n "${TLS:-}" ]; then create_certificates; scheme=https; fi
  [ -z "${HARDENED:-}" ] || create_keys
  build_images
  docker compose up --detach --remove-orphans "$@"
  wait_until_ready
  local service address
  for service in "console:18650 $scheme" "grafana:3000 http" "prometheus:9090 http" "retriever:18610 $scheme"; do
    read -r service scheme <<< "$service"
    if address=$(docker compose port "${service%:*}" "${service#*:}" 2>/dev/null); then printf '  %-11s %s://%s\n' "${service%:*}" "$scheme" "$address"; fi
  done
  echo "  'make logs SERVICE=trainer' follows the training; the console's token is in deploy/compose/secrets/console-token,"
  echo "  the password of Grafana's user admin in deploy/compose/secrets/grafana-password"
}

command=${1:-}; shift || true
# Docker Compose reads the files of this variable; paths in them are relative to the first.
[ -z "${HARDENED:-}" ] || TLS=1
[ -z "${TLS:-}" ] || export COMPOSE_FILE=docker-compose.yml:deploy/compose/tls.yml${HARDENED:+:deploy/compose/hardened.yml}
[ -z "${HARDENED:-}" ] || { SIGNING_GROUP=$(id -g); export SIGNING_GROUP; }
case $command in
  up) require_docker; up "$@" ;;
  down) require_docker; docker compose --profile '*' down --remove-orphans ${VOLUMES:+--volumes} ;;
  logs) require_docker; docker compose logs --follow --tail 200 ${SERVICE:+"$SERVICE"} ;;
  rotate) rotate ;;
  *) fail "the command is '$command', expected up, down, logs or rotate" ;;
esac
