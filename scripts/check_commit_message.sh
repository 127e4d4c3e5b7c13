#!/usr/bin/env bash
# Checks the first line of a commit message against Conventional Commits: check_commit_message.sh FILE
set -euo pipefail
line=$(head -n 1 "$1")
types='build|ci|docs|feat|fix|perf|refactor|revert|style|test|chore'
[[ $line =~ ^($types)(\([a-z0-9,_-]+\))?!?:\ .+ ]] || [[ $line =~ ^(Merge|Revert|fixup!|squash!)\  ]] || {
  echo "commit message: '$line' should read like 'fix(trainer): do not mark spans as failed on SIGTERM'" >&2
  echo "commit message: types are ${types//|/, }" >&2
  exit 1
}
