#!/usr/bin/env bash
# Runs every static check.
# usage: lint.sh [style|types|imports|shell|protos|web|audit …]      all of them by default
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venvs/cli/bin

style() { "$bin/ruff" check . && "$bin/ruff" format --check . && "$bin/python" scripts/check_structure.py && "$bin/python" scripts/check_tests.py; }

types() { "$bin/mypy" libs/*/forage_* services/*/forage_* cli/forage_cli models/forage_models; }

imports() {
  local folders=(libs/*/ services/*/ cli/ models/)
  PYTHONPATH=$(IFS=:; echo "${folders[*]}") "$bin/lint-imports" --no-logo --cache-dir .cache/imports
}

shell() {
  # It is no Python package: install it with the system's package manager, as CI does.
  command -v shellcheck >/dev/null || { echo "lint: shellcheck is not installed, shell scripts were not checked" >&2; return 0; }
  shellcheck --exclude=SC2015,SC2016 scripts/*.sh deploy/helm/forage/files/redis/*.sh .ci/run lab/benchmarks/*/run
}

protos() { (cd proto && "$bin/buf" lint) && scripts/proto.sh --check; }

web() { scripts/console.sh check; }

# Prints only what fails: `make audit` prints everything.
audit() { local found; found=$("$bin/python" scripts/audit.py) || { echo "$found" >&2; return 1; }; }

[ $# -gt 0 ] || set -- style types imports shell protos web audit
for check in "$@"; do
  [[ $check =~ ^(style|types|imports|shell|protos|web|audit)$ ]] ||
    { echo "lint: '$check' is not a check, expected style, types, imports, shell, protos, web or audit" >&2; exit 2; }
  "$check" || { echo "lint: $check failed" >&2; exit 1; }
done
echo "lint: all checks passed"
