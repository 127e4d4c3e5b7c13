#!/usr/bin/env bash
# Resolves every service's requirements.in into pinned versions: requirements.lock, and with the packages of
# services/gpu.sed requirements.gpu.lock.
set -euo pipefail
cd "$(dirname "$0")/../services"
uv=$PWD/../.venvs/uv/bin/uv
links=${PIP_FIND_LINKS:-$(../.venvs/uv/bin/pip config get global.find-links 2>/dev/null || true)}

# Resolves the requirements on stdin, in the folder of a service; what the lock has is kept where it can be.
# usage: resolve LOCK [option of uv …]
resolve() {
  local lock=$1 options=("${@:2}")
  [ ! -f overrides.txt ] || options+=(--overrides overrides.txt)
  "$uv" pip compile --quiet --python-version 3.11 --no-annotate --no-header "${options[@]}" - -o "$lock"
  [ ! -f nodeps.in ] || cat nodeps.in >> "$lock"
}

for service in cli console retriever reward rollout trainer; do
  (
    cd "$service"
    if [ -n "$links" ]; then options=(--find-links "$links"); else options=(--torch-backend cpu); fi
    resolve requirements.lock "${options[@]}" < requirements.in
    sed -E -f ../gpu.sed requirements.lock > requirements.gpu.lock
    if cmp -s requirements.lock requirements.gpu.lock; then rm requirements.gpu.lock; exit; fi
    # No wheel folder here: a CPU build of torch in it would satisfy the version, too.
    sed -E -f ../gpu.sed requirements.in | resolve requirements.gpu.lock
  )
done
