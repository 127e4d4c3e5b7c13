#!/usr/bin/env bash
# Runs `make test` three times in a row beside four busy processes: with PyTorch's kernels for any processor, with two
# threads in each numeric library, and in random order. All three must pass: no test depends on the machine.
# usage: stress_tests.sh [kernels|threads|order ...], all three by default; SEED is that of the order
set -uo pipefail
cd "$(dirname "$0")/.." || exit
seed=${SEED:-$RANDOM}
[ $# -gt 0 ] || set -- kernels threads order
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
for run in "$@"; do
  case $run in
    kernels) once "kernels for any processor (ATEN_CPU_CAPABILITY=default)" ATEN_CPU_CAPABILITY=default ;;
    threads) once "two threads (OMP_NUM_THREADS=2)" OMP_NUM_THREADS=2 ;;
    order) once "random order (seed $seed)" PYTEST_ADDOPTS="--random-order --random-order-seed=$seed" ;;
    *) echo "stress: there is no run '$run', expected kernels, threads or order" && exit 2 ;;
  esac
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'stress: failed with %s\n' "${failed[@]}"
  exit 1
fi
echo "stress: passed: $*"
