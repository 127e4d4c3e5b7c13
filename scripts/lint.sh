#!/usr/bin/env bash
# Everything that is checked without running the product.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venvs/cli/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" services/*/forage_* models/forage_models
packages=(services/*/ models/)
PYTHONPATH=$(IFS=:; echo "${packages[*]}") "$bin/lint-imports" --no-logo --cache-dir .cache/imports
"$bin/python" scripts/check_structure.py
(cd proto && "../$bin/buf" lint)
scripts/proto.sh --check
echo "lint: all clean"
