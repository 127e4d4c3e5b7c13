#!/usr/bin/env bash
# Installs the Debian packages that lint and tests use and that are missing here. Needs root; without a package the
# tests that need it are skipped, with the reason.
# usage: debian_packages.sh quick|long      what `make lint` and `make test` use, or also what `make test-long` does
set -euo pipefail
case ${1:-} in
  quick) commands=(shellcheck redis-server redis-cli) ;;
  long) commands=(shellcheck redis-server redis-cli chromium chromedriver prometheus promtool prometheus-redis-exporter) ;;
  *) echo "debian_packages: expected quick or long, not '${1:-}'" >&2; exit 2 ;;
esac
declare -A package=([redis-cli]=redis-server [promtool]=prometheus [chromedriver]=chromium-driver)
wanted=()
for command in "${commands[@]}"; do
  command -v "$command" >/dev/null || wanted+=("${package[$command]:-$command}")
done
[ ${#wanted[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "debian_packages: not installed (that needs root and apt-get): ${wanted[*]}" >&2
  exit 0
fi
# apt starts the services that it installs, unless this file forbids it with exit code 101.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
apt-get update -qq >/dev/null || true
for name in "${wanted[@]}"; do
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$name" >/dev/null ||
    echo "debian_packages: $name could not be installed (see above)" >&2
done
