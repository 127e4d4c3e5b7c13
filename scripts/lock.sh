#!/usr/bin/env bash
# Resolves every service's requirements.in into pinned versions with the hashes of their files: requirements.lock, and
# with the packages of services/gpu.sed requirements.gpu.lock. Adds the hashes to the lists of tools, too: each
# requirements*.txt of tests, docs, scripts and dashboards is complete as it stands, and becomes a .lock beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD uv=$PWD/.venvs/uv/bin/uv
links=${PIP_FIND_LINKS:-$(.venvs/uv/bin/pip config get global.find-links 2>/dev/null || true)}
# PyTorch's own wheels of the CPU build: Linux on x86_64 and on arm64. A folder of wheels has one of them at most.
torch='torch==2.13.0+cpu'
torch_hashes=(
  6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
  84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7
)

compile() { "$uv" pip compile --quiet --python-version 3.11 --no-annotate --no-header --generate-hashes "$@"; }

# Resolves the requirements on stdin, in the folder of a service; what the lock has is kept where it can be.
# usage: resolve LOCK [option of uv …]
resolve() {
  local lock=$1 options=(--constraints "$root/services/floors.txt" "${@:2}")
  [ ! -f overrides.txt ] || options+=(--overrides overrides.txt)
  compile "${options[@]}" - -o "$lock" > /dev/null
  sed -i -e "/^$torch/,/^[^ ]/{/^ /d}" -e "s|^$torch.*|$torch$(printf ' \\\\\\n    --hash=sha256:%s' "${torch_hashes[@]}")|" "$lock"
  [ ! -f nodeps.in ] || compile --no-deps nodeps.in >> "$lock"
  local unhashed
  if unhashed=$(grep -E '^[^ #].*==[^\\]*$' "$lock"); then
    echo "lock: $PWD/$lock has no hash of $unhashed: add it to scripts/lock.sh" >&2; exit 2
  fi
}

for home in cli services/{console,retriever,reward,rollout,trainer}; do
  (
    cd "$home"
    if [ -n "$links" ]; then options=(--find-links "$links"); else options=(--torch-backend cpu); fi
    resolve requirements.lock "${options[@]}" < requirements.in
    # The versions of the CPU's lock are where the other starts; the hashes of another build would be wrong.
    grep -vE '^ ' requirements.lock | sed -E 's| \\$||' | sed -E -f "$root/services/gpu.sed" > requirements.gpu.lock
    if cmp -s <(grep -vE '^ ' requirements.lock | sed -E 's| \\$||') requirements.gpu.lock; then rm requirements.gpu.lock; exit; fi
    # No wheel folder here: a CPU build of torch in it would satisfy the version, too.
    sed -E -f "$root/services/gpu.sed" requirements.in | resolve requirements.gpu.lock
  )
done

# The trackers of trainer.logger beside tensorboard: what requirements.lock lacks. It overrides their own bounds, which are
# below some of its versions.
(
  cd services/trainer
  compile trackers.txt --overrides <(grep -vE '^ ' requirements.lock | sed -E 's| \\$||') -o trackers.lock > /dev/null
  known=$(sed -nE 's/^([^ =]+)==.*/\1/p' requirements.lock)
  awk 'NR == FNR { known[$0]; next } /^[^ ]/ { split($0, part, "=="); kept = !(part[1] in known) } kept' \
    <(echo "$known") trackers.lock > trackers.lock.new
  mv trackers.lock.new trackers.lock
)

for list in {tests,docs,scripts,deploy/grafana}/requirements*.txt; do
  compile --no-deps "$list" -o "${list%.txt}.lock" > /dev/null
done
