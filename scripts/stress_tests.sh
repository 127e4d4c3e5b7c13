#!/usr/bin/env bash
# Runs `make test` three times in a row beside four busy processes: with PyTorch's kernels for any processor, with two
# threads in each numeric library, and in random order. All three must pass: no test depends on the machine.
# usage: stress_tests.sh [seed of the order]
set -uo pipefail
cd "$(dirname "$0")/.." || exit
seed=${1:-$RANDOM}
busy=()
for _ in 1 2 3 4; do
  while :; do :; done &
  busy+=($!)
done
# PyTorch's cache of compiled graphs does not tell kinds of processors apart (findings/torch-inductor-cache-processor.sh).
caches=$(mktemp -d)
trap 'kill "${busy[@]}"; rm -rf "$caches"' EXIT

failed=()
# usage: once NAME VARIABLE=VALUE
once() {
  echo "── stress: $1"
  env "$2" TORCHINDUCTOR_CACHE_DIR="$(mktemp -d -p "$caches")" .venvs/cli/bin/python scripts/run_tests.py quick || failed+=("$1")
}
once "kernels for any processor (ATEN_CPU_CAPABILITY=default)" ATEN_CPU_CAPABILITY=default
once "two threads (OMP_NUM_THREADS=2)" OMP_NUM_THREADS=2
once "random order (seed $seed)" PYTEST_ADDOPTS="--random-order --random-order-seed=$seed"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'stress: failed with %s\n' "${failed[@]}"
  exit 1
fi
echo "stress: all three runs passed"
