#!/usr/bin/env bash
# Runs every test in the environment it belongs to and ends with one line of totals.
# Tests share the cores in two lanes; those that start several services have the machine to themselves.
# usage: test.sh [pytest options]      e.g. test.sh -m 'not slow'
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
options=("$@")
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

run() { # run NAME ENVIRONMENT PATH…: one pytest; its output and exit status go to $logs/NAME
  local name=$1 environment=$2; shift 2
  {
    echo "── $environment: $*"
    ".venvs/$environment/bin/python" -m pytest "${options[@]}" "$@" 2>&1
    echo $? > "$logs/$name.status"
  } | tee "$logs/$name"
}

{ run common cli tests/unit/common tests/browser; run retriever retriever tests/unit/retriever tests/contract/test_index_command.py; } > /dev/null &
run reward reward tests/unit/reward tests/contract/test_reward_service.py tests/contract/test_reward_processes.py
run retriever_service retriever tests/contract/test_retriever_*.py
run deploy cli tests/deploy
wait
cat "$logs/common" "$logs/retriever"
run trainer trainer tests/unit/trainer tests/e2e/test_trainer_*.py > /dev/null &
run rollout rollout tests/unit/rollout tests/contract/test_rollout_faults.py tests/contract/test_knowledge_graph.py tests/contract/test_tracing.py
run deployments rollout tests/contract/test_rollout_deployments.py # Ray reads the environment once a process
wait
cat "$logs/trainer"
run rollout_service rollout tests/contract/test_rollout_joined_cluster.py tests/e2e/test_rollout_*.py tests/chaos/test_rollout_kills.py
run stack cli tests/contract/test_streams.py tests/e2e/test_forage.py tests/chaos/test_kills.py

passed=0 failed=0 skipped=0 broken=0
count() { local found; found=$(grep -oE "[0-9]+ $1" <<< "$2" | grep -oE '^[0-9]+'); echo "${found:-0}"; }
for name in common reward retriever retriever_service deploy rollout deployments rollout_service trainer stack; do
  # The closing line is not always the last: an engine may still say good-bye.
  closing=$(grep -E ' in [0-9.]+s' "$logs/$name" | tail -n 1)
  status=$(cat "$logs/$name.status" 2>/dev/null || echo 1)
  passed=$((passed + $(count passed "$closing"))); skipped=$((skipped + $(count skipped "$closing")))
  failed=$((failed + $(count failed "$closing") + $(count 'errors?' "$closing")))
  [ "$status" = 0 ] || [ "$status" = 5 ] || { broken=1; echo "failed: $name (pytest exit $status)"; }
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$broken" = 0 ] && [ "$failed" = 0 ]
