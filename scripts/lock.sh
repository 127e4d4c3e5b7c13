#!/usr/bin/env bash
# Resolves every service's requirements.in into pinned versions in its requirements.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$PWD/.venvs/uv/bin/uv
for service in cli retriever reward rollout trainer; do
  (
    cd "services/$service"
    options=(); [ ! -f overrides.txt ] || options+=(--overrides overrides.txt)
    links=${PIP_FIND_LINKS:-$(../../.venvs/uv/bin/pip config get global.find-links 2>/dev/null || true)}
    if [ -n "$links" ]; then options+=(--find-links "$links"); else options+=(--torch-backend cpu); fi
    "$uv" pip compile --quiet --python-version 3.11 --no-annotate --no-header "${options[@]}" requirements.in -o requirements.lock
    [ ! -f nodeps.in ] || cat nodeps.in >> requirements.lock
  )
done
