#!/usr/bin/env bash
# Runs every test in the environment it belongs to and ends with one line of totals.
# usage: test.sh [pytest options]      e.g. test.sh -m 'not slow'
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
passed=0 failed=0 skipped=0 broken=0
count() { grep -oE "[0-9]+ $1" <<< "$2" | grep -oE '[0-9]+' || echo 0; }
run() {
  local environment=$1; shift
  local paths=()
  for path in "$@"; do [ ! -e "$path" ] || paths+=("$path"); done
  echo "── $environment: ${paths[*]}"
  local log; log=$(mktemp)
  ".venvs/$environment/bin/python" -m pytest "${options[@]}" "${paths[@]}" 2>&1 | tee "$log"
  # The closing line is not always the last: an engine may still say good-bye.
  local status=${PIPESTATUS[0]} last; last=$(grep -E ' in [0-9.]+s' "$log" | tail -n 1); rm -f "$log"
  passed=$((passed + $(count passed "$last"))); skipped=$((skipped + $(count skipped "$last")))
  failed=$((failed + $(count failed "$last") + $(count 'errors?' "$last")))
  [ "$status" = 0 ] || [ "$status" = 5 ] || broken=1
}
options=("$@")
run common tests/unit/common
run reward tests/unit/reward tests/contract/test_reward_service.py tests/contract/test_reward_processes.py
run retriever tests/unit/retriever tests/contract/test_retriever_service.py
run rollout tests/unit/rollout tests/e2e/test_rollout_service.py
run trainer tests/unit/trainer tests/e2e/test_trainer_resume.py
run common tests/contract/test_streams.py tests/e2e/test_forage.py tests/chaos
echo "$passed passed, $failed failed, $skipped skipped"
[ "$broken" = 0 ] && [ "$failed" = 0 ]
